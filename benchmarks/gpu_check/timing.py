"""How long the device takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from executor_service.device import CudaGraphs


def median_s(run: Callable[[], object], device: torch.device, num_runs: int) -> float:
    """Seconds of one `run`, of which the first, which compiles, does not count."""
    run()
    return statistics.median(_elapsed_s(run, device) for _ in range(num_runs))


def recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`run` as a CUDA graph, so that the device does not wait for launches; on a CPU, as it is."""
    return CudaGraphs().record(run) if device.type == "cuda" else run


def now_s(device: torch.device) -> float:
    """Seconds, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _elapsed_s(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
