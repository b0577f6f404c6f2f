"""Fixtures: Triton's kernels run on the GPU if there is one, else in its interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="session")
def repaired_interpreter() -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from tests.support.devices.interpreter import repair

        repair()
