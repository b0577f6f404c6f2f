"""The tests of kernels, on the GPU that is here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import ROOT
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes

_FOLDERS = ("tests/kernels/gpu", "tests/unit/executor/gpu")
_TIMEOUT_S = 400
_MOST_PROCESSES = 8
# A bare CUDA image has no pytest-asyncio, whose options pytest does not know then.
_PYTEST = (
    "-q", "-p", "no:cacheprovider", "-rf",
    "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=",
)  # fmt: skip
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*)$", re.MULTILINE)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Each folder; in a smoke test they would be run a second time."""
    for folder in () if sizes.is_smoke else _FOLDERS:
        yield Case(folder, 200, partial(_run, folder))


def _run(folder: str) -> Iterator[Measurement]:
    command = [sys.executable, "-m", "pytest", *_PYTEST, *_side_by_side(), folder]
    try:
        done = subprocess.run(
            command, check=False, timeout=_TIMEOUT_S, cwd=ROOT, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        sys.stdout.write(_text(error.stdout)[-3000:])
        yield Measurement(folder, f"not over in {_TIMEOUT_S} s", is_met=False)
        return
    sys.stdout.write(done.stdout[-6000:] + done.stderr[-2000:])
    last = (done.stdout.strip().splitlines() or [""])[-1]
    yield Measurement(folder, f"exit code {done.returncode}", is_met=not done.returncode, note=last)
    for failed in _FAILED.findall(done.stdout):
        yield Measurement(failed[:200], "failed", is_met=False)


def _side_by_side() -> list[str]:
    """Most of the time goes into compiling."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(_MOST_PROCESSES, os.cpu_count() or 1))]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
