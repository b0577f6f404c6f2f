"""What recording steps as CUDA graphs costs at start: seconds and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import recorded_models, release_models, runner_of
from benchmarks.gpu_check.sizes import Sizes
from executor_service.backends import Compute
from executor_service.device import peak_meter_of

_NUM_BLOCKS = 512


def measure_recordings(compute: Compute, sizes: Sizes) -> Iterator[Measurement]:
    """A runner that records nothing beside one that records everything."""
    seconds, num_bytes = _cost(compute, sizes)
    yield Measurement("a runner without recordings", seconds, "s")
    if not compute.is_recordable:
        return
    models = recorded_models(compute, _most_rows(sizes), sizes)
    recorded_s, recorded_bytes = _cost(replace(compute, make_model=models.make), sizes)
    yield Measurement("recordings", recorded_s - seconds, "s")
    more = recorded_bytes - num_bytes
    yield Measurement("recordings, memory", more / 2**20, "MiB", note=_reserved(sizes))
    found = models.recorded
    assert found is not None, "a runner was made"
    note = f"{found.num_graphs} graphs in {found.seconds:.1f} s"
    yield Measurement("recordings, their pool", found.pool_bytes / 2**20, "MiB", note=note)


def _cost(compute: Compute, sizes: Sizes) -> tuple[float, int]:
    """Seconds and bytes that a runner takes."""
    release_models()
    started = time.perf_counter()
    num_bytes = peak_meter_of(sizes.device).peak_bytes(partial(_make, compute, sizes))
    return time.perf_counter() - started, num_bytes


def _make(compute: Compute, sizes: Sizes) -> None:
    with runner_of(compute, _NUM_BLOCKS, _most_rows(sizes), sizes, is_recorded=False):
        pass


def _most_rows(sizes: Sizes) -> int:
    return max(sizes.batches) + 1


def _reserved(sizes: Sizes) -> str:
    if sizes.device.type != "cuda":
        return ""
    return f"torch has {torch.cuda.memory_reserved(sizes.device) / 2**30:.2f} GiB then"
