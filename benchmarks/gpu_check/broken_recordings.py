"""What a recording that fails leaves behind, in a process of its own: it may be nothing good."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from executor_service.device import CudaGraphs
from executor_service.errors import RecordingFailed

_LARGE_BYTES = 2**33


def cases(sizes: Sizes) -> Iterator[Case]:
    """Only a GPU records."""
    if sizes.device.type == "cuda":
        yield Case("what waits", 5, partial(_waiting, sizes))
        yield Case("what breaks off", 5, partial(_breaking, sizes))


def _waiting(sizes: Sizes) -> Iterator[Measurement]:
    """It is found before anything is recorded, and costs nothing."""
    numbers = torch.ones(8, device=sizes.device)

    def run() -> None:
        numbers.add_(float(numbers.sum()))

    try:
        CudaGraphs().record(run)
        reason = "nothing was raised"
    except RecordingFailed as error:
        reason = f"RecordingFailed: {error}"
    except RuntimeError:
        reason = ""
    yield Measurement(
        "what waits is found before it is recorded", str(not reason), is_met=not reason, note=reason
    )
    yield from _still_works("after what waited", sizes, is_wanted=True)


def _breaking(sizes: Sizes) -> Iterator[Measurement]:
    """It must be said to whoever can start the process again."""
    numbers = torch.ones(8, device=sizes.device)
    before = torch.cuda.current_stream()

    def run() -> None:
        numbers.add_(1)
        if torch.cuda.is_current_stream_capturing():
            numbers.sum().item()

    try:
        CudaGraphs().record(run)
        reason = "nothing was raised"
    except RecordingFailed:
        reason = ""
    yield Measurement("a broken recording is said", str(not reason), is_met=not reason, note=reason)
    is_same = torch.cuda.current_stream() == before
    yield Measurement("the stream is the one before", str(is_same), is_met=is_same)
    # For this the executor starts again, so nothing is wanted.
    yield from _still_works("after a broken recording", sizes, is_wanted=False)


def _add(numbers: torch.Tensor) -> None:
    numbers.add_(1)


def _still_works(name: str, sizes: Sizes, *, is_wanted: bool) -> Iterator[Measurement]:
    try:
        large = torch.empty(_LARGE_BYTES, dtype=torch.uint8, device=sizes.device)
        del large
        torch.cuda.empty_cache()
        numbers = torch.ones(8, device=sizes.device)
        CudaGraphs().record(partial(_add, numbers))()
        torch.cuda.synchronize(sizes.device)
        reserved = torch.cuda.memory_reserved(sizes.device) >> 20
        found, note, is_right = "works", f"{reserved} MiB stay reserved", True
    except RuntimeError as error:
        found, note, is_right = "does not work", str(error)[:200], False
    yield Measurement(
        f"allocating and recording {name}", found, is_met=is_right if is_wanted else None, note=note
    )
