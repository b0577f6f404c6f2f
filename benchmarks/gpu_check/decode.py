"""Decode attention of equally long rows: what share of a copy's bandwidth it reads with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.aims import DECODE_SHARE, judged
from benchmarks.gpu_check.attention_times import attention_s, plain_layer
from benchmarks.gpu_check.backends import timed_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from executor_service.backends import Candidate

# (rows, tokens of each). From 17 rows on, some share a multiprocessor.
_BATCHES = (
    (1, 1024), (1, 8192), (1, 131072), (8, 8192), (16, 4096), (17, 4096), (20, 4096), (24, 4096),
    (32, 1024), (32, 4096), (64, 2048), (128, 1024), (256, 1024), (256, 2048), (4, 32768),
)  # fmt: skip
# Below, it is over before all of the device has begun.
_ENOUGH_BYTES = 10**8


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of each backend."""
    for candidate in timed_backends(sizes):
        for num_rows, context in _BATCHES[:2] if sizes.is_smoke else _BATCHES:
            name = f"{candidate.name}, {num_rows} rows of {context}"
            yield Case(name, 4, partial(_measure, name, candidate, (num_rows, context), sizes))


def _measure(
    name: str, candidate: Candidate, batch: tuple[int, int], sizes: Sizes
) -> Iterator[Measurement]:
    num_rows, context = batch
    rows = sizes.rows(((context - 1, 1),) * num_rows)
    layer = plain_layer(sizes)
    seconds = attention_s(candidate, layer, rows, sizes)
    num_bytes = layer.num_bytes(rows, sizes.dtype)
    share = num_bytes / seconds / rates_of(sizes).bandwidth
    note = f"{seconds * 1e6:.1f} us, {num_bytes / seconds / 1e9:.0f} GB/s"
    aim = DECODE_SHARE if num_bytes >= _ENOUGH_BYTES else None
    yield judged(name, share, "of copy", aim, sizes, note)
