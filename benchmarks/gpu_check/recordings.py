"""What recording steps as CUDA graphs costs at start: seconds and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import release_models, runner_of
from benchmarks.gpu_check.sizes import Sizes
from executor_service.backends.compute import Compute
from executor_service.device.memory import peak_meter_of

_NUM_BLOCKS = 512


def measure_recordings(compute: Compute, sizes: Sizes) -> Iterator[Measurement]:
    """A runner that records nothing beside one that records everything."""
    seconds, num_bytes = {}, {}
    for is_recorded in (False, True) if compute.is_recordable else (False,):
        release_models()
        meter = peak_meter_of(sizes.device)
        started = time.perf_counter()
        num_bytes[is_recorded] = meter.peak_bytes(lambda: _make(compute, sizes, is_recorded))  # noqa: B023
        seconds[is_recorded] = time.perf_counter() - started
    yield Measurement("a runner without recordings", seconds[False], "s")
    if compute.is_recordable:
        yield Measurement("recordings", seconds[True] - seconds[False], "s")
        more = num_bytes[True] - num_bytes[False]
        yield Measurement("recordings, memory", more / 2**20, "MiB", note=_reserved(sizes))


def _make(compute: Compute, sizes: Sizes, is_recorded: bool) -> None:
    most_rows = max(sizes.batches) + 1
    with runner_of(compute, _NUM_BLOCKS, most_rows, sizes, is_recorded=is_recorded):
        pass


def _reserved(sizes: Sizes) -> str:
    if sizes.device.type != "cuda":
        return ""
    return f"torch has {torch.cuda.memory_reserved(sizes.device) / 2**30:.2f} GiB then"
