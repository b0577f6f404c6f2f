"""Attention of rows that are not alike: one long one among short ones, decodes beside prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.aims import UNEVEN_TIMES, judged
from benchmarks.gpu_check.attention_times import attention_s, floor_s, launched_s, plain_layer
from benchmarks.gpu_check.backends import timed_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Rows, Sizes
from executor_service.backends import Candidate
from executor_service.runner import MAX_PROMPT_SIZE

_LONG = 131071
_CASES: dict[str, Rows] = {
    "32 rows of 5055, for comparison": ((5055, 1),) * 32,
    "31 rows of 1k and one of 128k": ((1023, 1),) * 31 + ((_LONG, 1),),
    "255 rows of 512 and one of 128k": ((511, 1),) * 255 + ((_LONG, 1),),
    "lengths from 64 to 16k, 64 rows": tuple((64 + 256 * index, 1) for index in range(64)),
    "4 decodes at 128k": ((_LONG, 1),) * 4,
    "4 decodes at 128k beside 256 tokens of a prompt": ((_LONG, 1),) * 4 + ((0, 256),),
    "32 decodes at 1k beside 512 tokens of a prompt": ((1023, 1),) * 32 + ((0, 512),),
    "128 decodes at 2k beside 2048 tokens behind 6k": ((2047, 1),) * 128 + ((6144, 2048),),
    "a turn of a chat, 20 tokens behind 30k": ((30_000, 20),),
    "16 turns of 20 tokens behind 8k": ((8192, 20),) * 16,
}


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of each backend."""
    for candidate in timed_backends(sizes):
        for name, rows in _CASES.items():
            line = f"{candidate.name}, {name}"
            yield Case(line, 4, partial(_measure, line, candidate, sizes.rows(rows), sizes))


def _measure(name: str, candidate: Candidate, rows: Rows, sizes: Sizes) -> Iterator[Measurement]:
    layer = plain_layer(sizes)
    floor = floor_s(layer, rows, sizes)
    has_prompt = any(new > 1 for _, new in rows)
    is_recorded = not has_prompt or sum(new for _, new in rows) <= MAX_PROMPT_SIZE
    seconds = (attention_s if is_recorded else launched_s)(candidate, layer, rows, sizes)
    how = "recorded" if is_recorded else "launched"
    note = f"{seconds * 1e6:.1f} us a layer, {how}, {floor * 1e6:.1f} at the least"
    yield judged(name, seconds / floor, "times", UNEVEN_TIMES, sizes, note)
