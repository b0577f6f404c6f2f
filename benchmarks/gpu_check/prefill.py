"""Attention of prompts: operations a second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.aims import PROMPT_ATTENTION, judged
from benchmarks.gpu_check.attention_times import launched_s, plain_layer
from benchmarks.gpu_check.backends import FLASH_ATTENTION_3, timed_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Rows, Sizes
from executor_service.backends import Candidate

_CASES: dict[str, Rows] = {
    "2048 tokens": ((0, 2048),),
    "8192 tokens": ((0, 8192),),
    "2048 tokens behind 6144": ((6144, 2048),),
    "2048 tokens behind 30720": ((30720, 2048),),
    "2048 tokens behind 120k": ((120_000, 2048),),
    "8 prompts of 512 tokens": ((0, 512),) * 8,
    "64 prompts of 64 tokens": ((0, 64),) * 64,
}
# The others are too short to fill the device.
_JUDGED = frozenset(name for name in _CASES if "behind" in name or "8192" in name)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of each backend."""
    for candidate in timed_backends(sizes):
        for name, rows in _CASES.items():
            yield Case(
                f"{candidate.name}, {name}",
                5,
                partial(_measure, candidate, name, sizes.rows(rows), sizes),
            )


def _measure(candidate: Candidate, name: str, rows: Rows, sizes: Sizes) -> Iterator[Measurement]:
    layer = plain_layer(sizes)
    seconds = launched_s(candidate, layer, rows, sizes)
    rate = layer.num_operations(rows) / seconds
    aim = PROMPT_ATTENTION[candidate.name == FLASH_ATTENTION_3] if name in _JUDGED else None
    note = f"{seconds * 1e6:.0f} us, {rate / rates_of(sizes).flops:.0%} of a matrix product"
    yield judged(f"{candidate.name}, {name}", rate / 1e12, "TFLOP/s", aim, sizes, note)
