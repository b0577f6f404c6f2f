"""The CPU kernels, once for each instruction set that this processor has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from splitserve_kernels.cpu import NativeLibrary, _torch_openmp
from splitserve_kernels.cpu.build import VARIANTS, Variant, _cpu_flags, library_path
from tests.kernels.cpu.tiny_decoders import DirectoryOf, save_decoder


@pytest.fixture(scope="session", params=VARIANTS, ids=lambda variant: variant.name)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    variant: Variant = request.param
    missing = variant.cpu_flags - _cpu_flags()
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    return NativeLibrary(library_path(variant, _torch_openmp()), variant.name)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    """Saves a decoder when it is first asked for."""
    saved: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in saved:
            saved[name, dtype] = save_decoder(name, tmp_path_factory.mktemp(name), dtype)
        return saved[name, dtype]

    return get


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Puts the number of torch's threads back after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
