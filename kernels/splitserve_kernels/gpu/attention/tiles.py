"""Shared code of decode and prefill: a tile of queries attends to a range of keys.

The softmax is computed online, along with the keys, in powers of two; accumulators are float32.
Sources: Dao, "FlashAttention-2", 2023, section 3.1; Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023, section 4.1.

Shape letters: T tokens over all rows, H query heads, G key/value heads, B block size, D size of a
query or key head, E size of a value head, M queries of a tile (tokens times the heads of a group).
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import functools
from typing import NamedTuple, TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.launch import LayerPools, next_power_of_2
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
# Smallest number of rows and columns that tl.dot accepts.
MIN_DOT_SIZE = 16

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def attend_to_keys(
    query: tl.tensor,
    attended: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    query_positions: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    score_scale: tl.tensor,
    IS_MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Continues the softmax of `query` over the keys at positions `first` .. `end` - 1.

    `query`: [M, BLOCK_D]. State, also returned: `attended` [M, BLOCK_E], `total` [M], `largest`
    [M], the weighted sum of values, the sum of weights and the largest score so far. `table`: the
    row's block table. `keys`, `values`: the pools, at the key/value head. Without IS_MASKED, every
    query sees every key and `end` - `first` is a multiple of BLOCK_N.
    """
    key_dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_N)
    # Block ids are loaded one tile ahead. Otherwise the loads of keys and values would wait for
    # them, and the compiler would overlap no load with the computation.
    next_blocks = tl.load(table + (first + lanes) // BLOCK_SIZE, mask=first + lanes < end, other=0)
    for start in range(first, end, BLOCK_N):
        positions = start + lanes
        is_key = positions < end
        key_mask = (key_dims < HEAD_DIM)[None, :]
        value_mask = (value_dims < VALUE_DIM)[None, :]
        if IS_MASKED:
            key_mask = key_mask & is_key[:, None]
            value_mask = value_mask & is_key[:, None]
        blocks = next_blocks.to(tl.int64)
        ahead = positions + BLOCK_N
        next_blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        slots = (positions % BLOCK_SIZE) * NUM_KV_HEADS

        key_offsets = blocks * key_block_stride + slots * HEAD_DIM
        key = tl.load(keys + key_offsets[:, None] + key_dims[None, :], mask=key_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        weights, correction, total, largest = weigh_scores(
            scores,
            total,
            largest,
            query_positions,
            positions,
            is_key,
            score_scale,
            IS_MASKED,
            WINDOW,
            SOFTCAP,
        )

        value_offsets = blocks * value_block_stride + slots * VALUE_DIM
        value = tl.load(
            values + value_offsets[:, None] + value_dims[None, :], mask=value_mask, other=0.0
        )
        attended = attended * correction[:, None]
        attended = tl.dot(
            weights.to(query.dtype), value.to(query.dtype), attended, input_precision="ieee"
        )
    return attended, total, largest


@triton.jit
def weigh_scores(
    scores: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    query_positions: tl.tensor,
    positions: tl.tensor,
    is_key: tl.tensor,
    score_scale: tl.tensor,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Returns the weights of a tile, a correction of earlier ones, and the new sum and maximum.

    `scores`: dot products [M, BLOCK_N] with the keys at `positions`. `correction`: [M], a factor of
    the weighted sum of values so far.
    """
    scores *= score_scale
    if SOFTCAP > 0:
        # tanh(x), where `scores` is 2 x log2(e).
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if IS_MASKED:
        distances = query_positions[:, None] - positions[None, :]
        is_visible = is_key[None, :] & (distances >= 0)
        if WINDOW > 0:
            is_visible = is_visible & (distances < WINDOW)
        scores = tl.where(is_visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # Avoids subtracting infinities for a query that has seen no key yet.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(largest - shift)
    return weights, correction, total * correction + tl.sum(weights, 1), new_largest


@triton.jit
def load_queries(
    query: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    is_query: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
) -> tl.tensor:
    """Returns the queries [M, BLOCK_D] of `tokens` [M] int64 and `heads` [M]; 0 in other lines."""
    dims = tl.arange(0, BLOCK_D)
    offsets = tokens * token_stride + heads * head_stride
    return tl.load(
        query + offsets[:, None] + dims[None, :],
        mask=is_query[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(COMPUTE_DTYPE)


@triton.jit
def nothing_attended(
    sinks: tl.tensor,
    heads: tl.tensor,
    is_query: tl.tensor,
    begin: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """Returns the state of `attend_to_keys` before the key tile `begin` of a row."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32) * _LOG2_E
        largest = tl.where(begin == 0, sink, float("-inf"))
        total = tl.where((begin == 0) & is_query, 1.0, 0.0)
    return tl.zeros([BLOCK_M, BLOCK_E], tl.float32), total, largest


@triton.jit
def store_lines(
    target: tl.tensor,
    offsets: tl.tensor,
    numbers: tl.tensor,
    is_query: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Stores the lines of `numbers` [M, BLOCK_E] that hold queries, as the heads at `offsets`."""
    dims = tl.arange(0, BLOCK_E)
    mask = is_query[:, None] & (dims < VALUE_DIM)[None, :]
    pointers = target + offsets[:, None] * VALUE_DIM + dims[None, :]
    tl.store(pointers, numbers.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_attended(
    output: tl.tensor,
    offsets: tl.tensor,
    attended: tl.tensor,
    total: tl.tensor,
    value_scale: tl.tensor,
    is_query: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Stores the weighted means of values: `attended` / `total`, times `value_scale`."""
    # Padding lines of the tile may have seen no key.
    total = tl.where(is_query, total, 1.0)
    attended = attended / total[:, None] * value_scale
    store_lines(output, offsets, attended, is_query, VALUE_DIM, BLOCK_E)


class AttentionConstants(TypedDict):
    """Compile-time constants of the kernels that are the same for all calls of a layer."""

    GROUP: int
    NUM_KV_HEADS: int
    BLOCK_SIZE: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int
    BLOCK_E: int
    WINDOW: int
    SOFTCAP: float
    HAS_SINKS: bool
    COMPUTE_DTYPE: tl.dtype


def attention_constants(
    query: Tensor, pools: LayerPools, options: AttentionOptions
) -> AttentionConstants:
    """Returns the constants of a layer; do not modify them. `query`: [T, H, D].

    Window and softcap 0 stand for none.
    """
    # Products of any two of the other dtypes are exact in float32; float8 fits into all of them.
    is_narrow = pools.is_float8 or pools.key.dtype == pools.value.dtype == query.dtype
    return _constants(
        query.shape[1],
        query.shape[2],
        query.dtype if is_narrow else torch.float32,
        pools.key.shape[1:3],
        pools.value.shape[3],
        options.sliding_window or 0,
        options.softcap or 0.0,
        options.sinks is not None,
    )


@functools.cache
def _constants(
    num_heads: int,
    head_dim: int,
    compute_dtype: torch.dtype,
    block_shape: tuple[int, int],
    value_dim: int,
    window: int,
    softcap: float,
    has_sinks: bool,
) -> AttentionConstants:
    """Builds the constants; cached, as each layer asks in each step and the host may be critical.

    `block_shape`: block size and number of key/value heads.
    """
    block_size, num_kv_heads = block_shape
    return AttentionConstants(
        GROUP=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=max(MIN_DOT_SIZE, next_power_of_2(head_dim)),
        BLOCK_E=max(MIN_DOT_SIZE, next_power_of_2(value_dim)),
        WINDOW=window,
        SOFTCAP=LOG2_E * softcap,
        HAS_SINKS=has_sinks,
        COMPUTE_DTYPE=_TRITON_DTYPES[compute_dtype],
    )


def is_float32(constants: AttentionConstants) -> bool:
    """Returns whether products are computed in float32, without tensor cores."""
    return bool(constants["COMPUTE_DTYPE"] == tl.float32)


def score_scale(pools: LayerPools, options: AttentionOptions) -> float:
    """Returns the factor of dot products in `attend_to_keys`: scores in units of log 2."""
    scale = options.scale * pools.scales.key * LOG2_E
    return scale if options.softcap is None else 2 * scale / options.softcap


class SharedArguments(NamedTuple):
    """Arguments that all attention kernels take, in three consecutive groups."""

    tensors: tuple[Tensor, ...]
    scales: tuple[float, float]
    strides: tuple[int, ...]


def shared_arguments(
    query: Tensor, pools: LayerPools, batch: PagedBatch, options: AttentionOptions, output: Tensor
) -> SharedArguments:
    """Returns the arguments of a kernel from `query` to `output`, its scales and its strides."""
    return SharedArguments(
        tensors=(
            query,
            pools.key,
            pools.value,
            batch.block_tables,
            batch.num_computed_tokens,
            batch.query_starts,
            output if options.sinks is None else options.sinks,
            output,
        ),
        scales=(score_scale(pools, options), float(pools.scales.value)),
        strides=(
            query.stride(0),
            query.stride(1),
            pools.key.stride(0),
            pools.value.stride(0),
            batch.block_tables.stride(0),
        ),
    )
