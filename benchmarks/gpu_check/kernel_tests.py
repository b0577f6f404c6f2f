"""The tests of kernels, on the GPU that is here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu_check.results import Measurement

TESTS = ("tests/kernels/gpu", "tests/unit/executor/gpu")
_TESTS_TIMEOUT_S = 450
# A bare CUDA image has no pytest-asyncio, whose options pytest does not know then.
_PYTEST = (
    "-q", "-p", "no:cacheprovider",
    "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=",
)  # fmt: skip


def run_tests(folder: str) -> Iterator[Measurement]:
    """Whether all tests in `folder` pass, in the time that there is."""
    command = [sys.executable, "-m", "pytest", *_PYTEST, folder]
    try:
        code = subprocess.run(command, check=False, timeout=_TESTS_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        yield Measurement("tests", folder, f"not over in {_TESTS_TIMEOUT_S} s", is_met=False)
    else:
        yield Measurement("tests", folder, f"exit code {code}", is_met=code == 0)
