"""Other heads than those of Llama, windows and pools of float8: how fast attention is there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_check.attention_times import Layer, attention_s, floor_s, launched_s
from benchmarks.gpu_check.backends import timed_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Rows, Sizes
from executor_service.backends import Candidate

_FLOAT8 = torch.float8_e4m3fn
_LAYERS = {
    "32/8 heads of 128, float8 pools": Layer(32, 8, 128, 128, kv_dtype=_FLOAT8),
    "64/8 heads of 64": Layer(64, 8, 64, 64),
    "64/8 heads of 64, window of 128": Layer(64, 8, 64, 64, window=128),
    "32/8 heads of 128, window of 4096": Layer(32, 8, 128, 128, window=4096),
    "16/8 heads of 256, softcap": Layer(16, 8, 256, 256, softcap=50.0),
    "16/8 heads of 256, softcap, float8 pools": Layer(
        16, 8, 256, 256, softcap=50.0, kv_dtype=_FLOAT8
    ),
    "4/1 heads of 256, window of 512": Layer(4, 1, 256, 256, window=512),
    "16/16 heads of 128": Layer(16, 16, 128, 128),
    "71/1 heads of 64": Layer(71, 1, 64, 64),
    "16/16 heads of 192 and 128": Layer(16, 16, 192, 128),
    "8/1 heads of 512": Layer(8, 1, 512, 512),
}
_ROWS: dict[str, Rows] = {
    "32 rows of 8k": ((8191, 1),) * 32,
    "256 rows of 1k": ((1023, 1),) * 256,
    "2048 tokens behind 6144": ((6144, 2048),),
}


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of each backend that takes such layers."""
    for candidate in timed_backends(sizes):
        for layer_name, layer in list(_LAYERS.items())[: 5 if sizes.is_smoke else None]:
            if layer.why_not(candidate, sizes.dtype) is not None:
                continue
            for rows_name, rows in _ROWS.items():
                name = f"{candidate.name}, {layer_name}, {rows_name}"
                run = partial(_measure, name, candidate, layer, sizes.rows(rows), sizes)
                yield Case(name, 4, run)


def _measure(
    name: str, candidate: Candidate, layer: Layer, rows: Rows, sizes: Sizes
) -> Iterator[Measurement]:
    is_decode = all(new == 1 for _, new in rows)
    seconds = (attention_s if is_decode else launched_s)(candidate, layer, rows, sizes)
    floor = floor_s(layer, rows, sizes)
    note = f"{seconds * 1e6:.1f} us, {floor * 1e6:.1f} at the least"
    yield Measurement(name, floor / seconds, "of the least", note=note)
