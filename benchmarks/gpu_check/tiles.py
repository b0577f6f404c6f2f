"""Other sizes of attention's tiles than those it takes: whether some are faster on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_check.attention_times import attention_s, launched_s, plain_layer
from benchmarks.gpu_check.backends import TRITON, timed_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Rows, Sizes
from executor_service.backends import Candidate
from executor_service.errors import one_line

if TYPE_CHECKING:
    from splitserve_kernels.gpu.attention.tile_sizes import TileSizes

# Changes to the sizes that are taken.
_DECODE: tuple[dict[str, Any], ...] = (
    {}, {"num_stages": 2}, {"num_stages": 4}, {"num_keys": 32}, {"num_keys": 128},
    {"num_keys": 128, "num_stages": 2}, {"num_warps": 2}, {"num_warps": 8},
)  # fmt: skip
_PREFILL: tuple[dict[str, Any], ...] = (
    {}, {"num_stages": 2}, {"num_stages": 4}, {"num_keys": 128}, {"num_keys": 128, "num_stages": 2},
    {"num_keys": 32}, {"num_queries": 64, "num_warps": 4}, {"num_warps": 4},
    {"num_queries": 64, "num_warps": 4, "num_stages": 2}, {"overlaps": False},
    {"overlaps": False, "num_keys": 128, "num_stages": 2},
)  # fmt: skip
_DECODES: dict[str, Rows] = {
    "1 row of 8k": ((8191, 1),),
    "32 rows of 4k": ((4095, 1),) * 32,
    "256 rows of 1k": ((1023, 1),) * 256,
}
_PROMPTS: dict[str, Rows] = {"8192 tokens": ((0, 8192),), "2048 behind 30k": ((30720, 2048),)}


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of Triton's kernels, in bf16 and with the heads of an 8B Llama."""
    for candidate in timed_backends(sizes):
        if candidate.name != TRITON:
            continue
        for change in _DECODE:
            name = f"decode, {_text(change)}"
            run = partial(_decodes, name, change, candidate, sizes)
            yield Case(name, 6, partial(_if_it_fits, name, run))
        for change in _PREFILL:
            name = f"prompt, {_text(change)}"
            run = partial(_prompts, name, change, candidate, sizes)
            yield Case(name, 8, partial(_if_it_fits, name, run))


def _if_it_fits(name: str, run: Callable[[], Iterator[Measurement]]) -> Iterator[Measurement]:
    """Tiles may be too large for shared memory, or of a form that the compiler refuses."""
    try:
        yield from run()
    except Exception as error:  # compilers raise whatever they like
        yield Measurement(name, "does not run", note=f"{type(error).__name__}: {one_line(error)}")


def _decodes(
    name: str, change: dict[str, Any], candidate: Candidate, sizes: Sizes
) -> Iterator[Measurement]:
    from splitserve_kernels.gpu.attention import paged_decode

    with _changed(paged_decode, "decode_tile_sizes", change):
        for rows_name, rows in _DECODES.items():
            seconds = attention_s(candidate, plain_layer(sizes), sizes.rows(rows), sizes)
            yield Measurement(f"{name}: {rows_name}", seconds * 1e6, "us")


def _prompts(
    name: str, change: dict[str, Any], candidate: Candidate, sizes: Sizes
) -> Iterator[Measurement]:
    from splitserve_kernels.gpu.attention import backend

    layer = plain_layer(sizes)
    with _changed(backend, "prefill_tile_sizes", change):
        for rows_name, rows in _PROMPTS.items():
            seconds = launched_s(candidate, layer, sizes.rows(rows), sizes)
            rate = layer.num_operations(rows) / seconds / 1e12
            yield Measurement(f"{name}: {rows_name}", rate, "TFLOP/s")


@contextmanager
def _changed(module: ModuleType, chooser: str, change: dict[str, Any]) -> Iterator[None]:
    """Inside, `module` takes the sizes of its function `chooser` with `change`."""
    choose: Callable[..., TileSizes] = getattr(module, chooser)

    def choose_others(*arguments: object) -> TileSizes:
        sizes = choose(*arguments)
        return replace(sizes, **{**change, "num_heads": _num_heads(sizes, change)})

    setattr(module, chooser, choose_others)
    try:
        yield
    finally:
        setattr(module, chooser, choose)


def _num_heads(sizes: TileSizes, change: dict[str, Any]) -> int:
    num_queries: int = change.get("num_queries", sizes.num_queries)
    return min(sizes.num_heads, num_queries)


def _text(change: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in change.items()) or "as it is"
