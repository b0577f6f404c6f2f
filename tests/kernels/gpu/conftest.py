"""The kernels run on the GPU if there is one, otherwise on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="session")
def _repaired_interpreter() -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from tests.kernels.gpu.interpreter import repair

        repair()
