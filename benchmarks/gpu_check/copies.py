"""Copies between host and device: pageable against pinned memory, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_check.aims import ASKING_MS, judged
from benchmarks.gpu_check.busy_device import busy
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import median_s, now_s
from executor_service.device import IntegerArrays, Uploads, host_memory, pin_for, streams_of

# About 64 KiB the driver is said to change its ways.
_SIZES = (1 << 12, 1 << 16, (1 << 16) + 64, 1 << 18, 1 << 21)
_LARGE_BYTES = 2**28
_PINNED_BYTES = 2**30


def cases(sizes: Sizes) -> Iterator[Case]:
    """What a call takes while the device is busy for longer, then rates."""
    for num_bytes in _SIZES:
        yield Case(f"{num_bytes} bytes", 2, partial(_asking, num_bytes, sizes))
    yield Case("rates", 5, partial(_rates, _LARGE_BYTES // sizes.divisor**2, sizes))
    yield Case("pinning", 5, partial(_pinning, _PINNED_BYTES // sizes.divisor**2, sizes))


def _asking(num_bytes: int, sizes: Sizes) -> Iterator[Measurement]:
    device = sizes.device
    uploads = Uploads(device, streams_of(device))
    numbers = IntegerArrays([np.zeros(num_bytes // 8, np.int64)], [])
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    answer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    ways: dict[str, tuple[Callable[[], object], bool]] = {
        "from pageable memory": (partial(pageable.to, device, non_blocking=True), False),
        "by Uploads": (partial(uploads.send, numbers), True),
        "to pinned memory": (partial(streams_of(device).copy_to_host, answer), True),
    }
    for name, (ask, must_not_wait) in ways.items():
        ask()  # allocates
        now_s(device)
        with busy(device):
            started = time.perf_counter()
            ask()
            milliseconds = (time.perf_counter() - started) * 1e3
        aim = ASKING_MS if must_not_wait else None
        waits = "" if milliseconds < ASKING_MS.figure else "it WAITS for the device"
        line = f"{num_bytes} bytes {name}, the call beside a busy device"
        yield judged(line, milliseconds, "ms", aim, sizes, waits)


def _rates(num_bytes: int, sizes: Sizes) -> Iterator[Measurement]:
    device = sizes.device
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    for kind, pin in (("pageable", None), ("pinned", pin_for(device))):
        here = host_memory(num_bytes, pin)
        for direction, source, target in (("to device", here, there), ("to host", there, here)):
            copy = partial(target.copy_, source, non_blocking=True)
            rate = num_bytes / median_s(copy, device, sizes.num_runs)
            yield Measurement(f"{kind} memory {direction}", rate / 1e9, "GB/s")


def _pinning(num_bytes: int, sizes: Sizes) -> Iterator[Measurement]:
    started = time.perf_counter()
    host_memory(num_bytes, pin_for(sizes.device))
    seconds = time.perf_counter() - started
    note = "of fresh pages, as at start"
    yield Measurement("a GiB pinned", seconds * 2**30 / num_bytes, "s", note=note)
