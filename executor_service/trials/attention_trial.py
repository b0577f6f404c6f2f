"""Trials of attention backends, and of the kernel that rotates heads and writes keys and values.

Shape letters: R rows, M blocks of a block table, T input tokens, H query heads, G key/value heads,
D, E head sizes, r rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_service.device import KVCache, LayerShape
from executor_service.errors import TrialFailed
from executor_service.model import LayerKind, LoadedModel, layer_kinds
from executor_service.trials.trial import Trial, trial_failures
from splitserve_kernels import reference
from splitserve_kernels.gpu.launch import LayerPools, RotaryTables
from splitserve_kernels.paged_batch import (
    SLOT_SCALES,
    UNIT_SCALES,
    AttentionBackend,
    KVScales,
    PagedBatch,
    build_paged_batch,
)

# Largest difference of an output, by the dtype of queries; outputs are averages of numbers of about
# 1. Float8 pools need no more: the reference has float8 pools, too, and both round to the nearest.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# Limits for backends that round queries and weights to 8 bits: root mean square, single output.
_ROUNDED_TOLERANCE, _ROUNDED_OUTLIER = 0.02, 0.5
# Scales of float8 pools, so that a backend that ignores them fails; most numbers fit with these.
_FLOAT8_SCALES = KVScales(key=0.07, value=0.04)
# A decode, a decode far beyond the window, the end of a short prompt, a chunk after a prefix; see
# `_num_computed`. Decodes come first, as in a step, because a backend may compute them apart.
_NUM_NEW = (1, 1, 37, 20)
# Padding tokens without a row, as in a recorded step. Backends choose kernels by the number of
# tokens: with these tokens a GPU is full, without them it is not.
_NUM_ADDED_TOKENS = 8192


def try_backend(
    backend: AttentionBackend, loaded: LoadedModel, block_size: int, *, rounds_queries: bool = False
) -> None:
    """Compares outputs with the reference's on random rows, for each kind of layer of `loaded`.

    `rounds_queries`: the backend rounds queries and weights to 8 bits, so it may differ more.
    Raises TrialFailed, also if the backend raises something.
    """
    for kind in layer_kinds(loaded):
        try_layer(
            backend,
            kind,
            block_size,
            loaded.dtype,
            loaded.device,
            loaded.kv_dtype,
            rounds_queries=rounds_queries,
            has_slot_scales=loaded.has_slot_scales,
        )


@torch.inference_mode()
def try_layer(
    backend: AttentionBackend,
    kind: LayerKind,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    *,
    rounds_queries: bool = False,
    has_slot_scales: bool = False,
) -> None:
    """Compares outputs with the reference's, as `try_backend` does, for layers of one kind.

    `dtype`: of queries. `kv_dtype`: dtype of the pools, None for `dtype`. `has_slot_scales`:
    8-bit pools have their scales in slots.
    """
    error_of = _error_of_rounding if rounds_queries else _error
    allowed = _ROUNDED_TOLERANCE if rounds_queries else _TOLERANCES[dtype]
    with trial_failures():
        oracle, tried = _pools(kind.layer, block_size, kv_dtype or dtype, device, has_slot_scales)
        Trial(
            reference=lambda case: _attended(reference, oracle, kind, case),
            candidate=lambda case: _attended(backend, tried, kind, case),
            cases=_cases(kind, block_size, dtype, device),
            error_of=lambda _case, expected, actual: error_of(expected, actual),
            allowed=allowed,
            complaint=lambda error: (
                f"the output differs by {error:.2g} from the reference's, allowed {allowed:g}"
                f" in {dtype} over {oracle.dtype}"
            ),
        ).check()


def _pools(
    layer: LayerShape,
    block_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    has_slot_scales: bool,
) -> tuple[KVCache, KVCache]:
    """Returns the pools of the reference and those of the backend."""
    num_blocks = _block_tables(block_size).numel()
    scales: tuple[KVScales, ...] = ()
    if kv_dtype.itemsize == 1:
        scales = (SLOT_SCALES if has_slot_scales else _FLOAT8_SCALES,)
    oracle, tried = (
        KVCache([layer], block_size, num_blocks, 0, kv_dtype, device, scales=scales)
        for _ in range(2)
    )
    return oracle, tried


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one attention call, with their input tokens.

    `num_padding_tokens`: tokens without a row, after all others.
    """

    batch: PagedBatch
    query: Tensor
    key: Tensor
    value: Tensor
    num_padding_tokens: int = 0


def _cases(
    kind: LayerKind, block_size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[_Rows]:
    """Yields prompts, all kinds of rows in one batch, and decodes, each after those before."""
    layer = kind.layer
    generator = torch.Generator().manual_seed(0)
    computed, new = torch.tensor(_num_computed(block_size)), torch.tensor(_NUM_NEW)
    tables = _block_tables(block_size)
    none, ones = torch.zeros_like(computed), torch.ones_like(computed)
    for before, count in ((none, computed), (computed, new), (computed + new, ones)):
        batch = build_paged_batch(tables, before, count, block_size, device)
        query, key, value = (
            torch.randn(len(batch.slot_mapping), heads, size, generator=generator).to(device, dtype)
            for heads, size in (
                (kind.num_heads, layer.key_dim),
                (layer.num_kv_heads, layer.key_dim),
                (layer.num_kv_heads, layer.value_dim),
            )
        )
        yield _Rows(batch, query, key, value)
        if device.type == "cuda" and batch.max_num_new_tokens > 1:
            yield _Rows(batch, query, key, value, _NUM_ADDED_TOKENS)


def _attended(backend: AttentionBackend, cache: KVCache, kind: LayerKind, rows: _Rows) -> Tensor:
    """Writes keys and values, and attends. Returns the float32 output of tokens that have a row.

    Backends may store keys and values in their own layout, so each has its own `cache`.
    """
    pools, scales = (cache.key_pools[0], cache.value_pools[0]), cache.scales[0]
    query = rows.query
    backend.write_kv(rows.key, rows.value, *pools, rows.batch, scales)
    if rows.num_padding_tokens and backend is not reference:
        padding = query.new_zeros(rows.num_padding_tokens, *query.shape[1:])
        query = torch.cat([query, padding])
    output = backend.paged_attention(query, *pools, rows.batch, kind.options, scales)
    return output[: len(rows.query)].float()


def _error(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max())


def _error_of_rounding(expected: Tensor, actual: Tensor) -> float:
    """Returns the root mean square error; the largest one if that cannot be rounding."""
    largest = _error(expected, actual)
    if not largest <= _ROUNDED_OUTLIER:
        return largest
    return float((expected - actual).square().mean().sqrt())


def _num_computed(block_size: int) -> tuple[int, ...]:
    """Returns computed tokens of the rows: the second and the last cross blocks."""
    return (40, max(150, 2 * block_size + 40), 1, max(33, block_size - 10))


def _block_tables(block_size: int) -> Tensor:
    """Returns shuffled blocks for the rows, [R, M]."""
    # One more token for the final decode.
    computed = _num_computed(block_size)
    ends = [before + new + 1 for before, new in zip(computed, _NUM_NEW, strict=True)]
    width = -(-max(ends) // block_size)
    blocks = torch.randperm(len(ends) * width, generator=torch.Generator().manual_seed(2))
    return blocks.view(len(ends), width)


# -- Trial of the kernel that rotates heads and writes keys and values -----------------------------
#
# Shape letters: T tokens, H query heads, G key/value heads, D head size, r rotated dimensions.

# See `splitserve_kernels.gpu.kv_write`: heads, tables, pools, slots -> rotated query.
RotaryWrite = Callable[[tuple[Tensor, Tensor, Tensor], RotaryTables, LayerPools, Tensor], Tensor]

_NUM_TOKENS = 37
# Relative size of the last bit: sums of two products may be rounded in between or not.
_LAST_BITS = {
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-3,
}
_ABSOLUTE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class _RotatedHeads:
    """Heads to rotate and write. `slots`: of the tokens, [T]; a negative one is not written."""

    heads: tuple[Tensor, Tensor, Tensor]
    rotary: RotaryTables
    slots: Tensor


# Rotated query, keys and values of the pools.
_Written = tuple[Tensor, Tensor, Tensor]


@torch.inference_mode()
def try_rotary_write(write: RotaryWrite, loaded: LoadedModel, block_size: int, half: int) -> None:
    """Compares results of `write` with plain torch, on random heads like those of `loaded`.

    `half`: half of the rotated dimensions. Raises TrialFailed, also if `write` raises something.
    """
    with trial_failures("rotating and writing heads"):
        num_blocks = -(-_NUM_TOKENS // block_size) + 1
        layer, device = layer_kinds(loaded)[0].layer, loaded.device
        cache = KVCache([layer], block_size, num_blocks, 0, loaded.kv_dtype, device)
        is_scaled = loaded.kv_dtype.itemsize == 1
        scales = KVScales(key=0.07, value=0.04) if is_scaled else UNIT_SCALES
        pools = LayerPools(cache.key_pools[0], cache.value_pools[0], scales)

        def candidate(case: _RotatedHeads) -> _Written:
            query = write(case.heads, case.rotary, pools, case.slots)
            return query, pools.key, pools.value

        Trial(
            reference=lambda case: _written_in_torch(case, pools),
            candidate=candidate,
            cases=(_rotated_heads(loaded, num_blocks * block_size, half),),
            error_of=lambda _case, expected, actual: _largest_excess(expected, actual, loaded),
            allowed=_ABSOLUTE_TOLERANCE,
        ).check()


def _rotated_heads(loaded: LoadedModel, num_slots: int, half: int) -> _RotatedHeads:
    device, kind = loaded.device, layer_kinds(loaded)[0]
    num_heads, num_kv_heads = kind.num_heads, kind.layer.num_kv_heads
    generator = torch.Generator().manual_seed(0)
    # Heads lie next to each other, as one product makes them.
    shape = (_NUM_TOKENS, num_heads + 2 * num_kv_heads, kind.layer.key_dim)
    heads = (3 * torch.randn(shape, generator=generator)).to(device, loaded.dtype)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = (9 * torch.randn(_NUM_TOKENS, half, generator=generator)).to(device)
    slots = torch.randperm(num_slots, generator=generator)[:_NUM_TOKENS].to(device)
    slots[-1] = -1  # not to be written
    return _RotatedHeads((query, key, value), RotaryTables(angles.cos(), angles.sin()), slots)


def _written_in_torch(case: _RotatedHeads, pools: LayerPools) -> _Written:
    """Returns what a kernel should return and write, in float32."""
    query, key, value = case.heads
    return (
        _turned(query, case.rotary),
        _pool_of(_turned(key, case.rotary) / pools.scales.key, pools.key, case.slots),
        _pool_of(value.float() / pools.scales.value, pools.value, case.slots),
    )


def _largest_excess(expected: _Written, actual: _Written, loaded: LoadedModel) -> float:
    """Returns the largest error beyond the last bit. Raises TrialFailed if it is too large."""
    largest = 0.0
    for name, right, found in zip(("query", "key", "value"), expected, actual, strict=True):
        error = _excess(found, right, found.dtype)
        if not error <= _ABSOLUTE_TOLERANCE:
            raise TrialFailed(
                f"the {name} differs by {error:.2g} more than its last bit, in {loaded.dtype} over"
                f" {loaded.kv_dtype}"
            )
        largest = max(largest, error)
    return largest


def _turned(heads: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotates the first R dimensions of heads [T, .., D]. Returns float32 of the same shape."""
    half = rotary.cosine.shape[1]
    x, y, rest = torch.split(heads.float(), [half, half, heads.shape[-1] - 2 * half], dim=-1)
    cosine, sine = rotary.cosine[:, None], rotary.sine[:, None]
    return torch.cat([x * cosine - y * sine, y * cosine + x * sine, rest], dim=-1)


def _pool_of(written: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """Returns a pool like `pool` in float32 that holds `written` [T, G, D] and else zeros.

    Tokens without a slot are not written.
    """
    # Float8 tensors cannot be indexed, so the comparison is in float32.
    expected = torch.zeros(pool.shape, device=pool.device)
    expected.flatten(0, 1)[slots[slots >= 0]] = written[slots >= 0]
    return expected


def _excess(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Returns the largest error beyond the last bit of `expected`, float32, rounded to `dtype`.

    NaN if any number is NaN.
    """
    rounded = expected.to(dtype).float()
    return float(((actual.float() - rounded).abs() - _LAST_BITS[dtype] * rounded.abs()).max())
