"""Paged attention of rows with one new token: the keys of a row are split over several programs.

Each split leaves an unnormalised sum, its softmax total and its largest score; a second kernel
merges them. Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a query
or key head, E size of a value head, P splits, M heads of a group, padded.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.split_merge import SplitSums, merge_splits
from splitserve_kernels.gpu.attention.splits import choose_num_splits, num_multiprocessors
from splitserve_kernels.gpu.attention.tiles import (
    LOG2_E,
    MIN_DOT_SIZE,
    attend_to_keys,
    attention_constants,
    is_large,
    score_scale,
)
from splitserve_kernels.gpu.layer_pools import LayerPools
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch

_LOG2_E = tl.constexpr(LOG2_E)


def paged_decode(
    query: Tensor,
    pools: LayerPools,
    batch: PagedBatch,
    options: AttentionOptions,
    num_splits: int | None = None,
) -> Tensor:
    """`reference.paged_attention` for a batch whose rows have no more than one new token each.

    `query`: [T, H, D], last stride 1. Returns [T, H, E] in the dtype of `query`. What is launched
    depends on shapes, on `batch.max_num_tokens` and on the device only, so that a CUDA graph can
    record it. `num_splits`, at most MAX_NUM_SPLITS, is chosen if it is None.
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_dim = pools.num_kv_heads, pools.value.shape[3]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    if num_tokens == 0:
        return output
    if num_splits is None:
        num_splits = _num_splits(query, pools, batch, options)
    is_split = num_splits > 1
    parts = largest = total = output
    if is_split:
        shape = (num_splits, num_tokens, num_heads)
        parts = query.new_empty(*shape, value_dim, dtype=torch.float32)
        largest, total = query.new_empty(2, *shape, dtype=torch.float32)
    constants = attention_constants(query, pools, options)
    block_m = max(MIN_DOT_SIZE, triton.next_power_of_2(constants["GROUP"]))
    _decode_kernel[(batch.num_rows, num_kv_heads, num_splits)](
        query,
        pools.key,
        pools.value,
        batch.block_tables,
        batch.num_computed_tokens,
        batch.query_starts,
        output if options.sinks is None else options.sinks,
        parts,
        largest,
        total,
        score_scale(pools, options),
        float(pools.scales.value),
        num_tokens,
        query.stride(0),
        query.stride(1),
        pools.key.stride(0),
        pools.value.stride(0),
        batch.block_tables.stride(0),
        IS_SPLIT=is_split,
        BLOCK_M=block_m,
        BLOCK_N=32 if is_large(constants) else 64,
        num_warps=8 if block_m > 32 else 4,
        num_stages=3,
        **constants,
    )
    if is_split:
        merge_splits(SplitSums(parts, largest, total), batch, output, pools.scales.value)
    return output


def _num_splits(
    query: Tensor, pools: LayerPools, batch: PagedBatch, options: AttentionOptions
) -> int:
    in_sight = min(batch.max_num_tokens, options.sliding_window or batch.max_num_tokens)
    num_programs = batch.num_rows * pools.num_kv_heads
    return choose_num_splits(num_programs, in_sight, num_multiprocessors(query.device))


@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def _decode_kernel(
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    block_tables: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    sinks: tl.tensor,
    parts: tl.tensor,
    largest_of_parts: tl.tensor,
    total_of_parts: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    num_tokens: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    table_stride: tl.tensor,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
) -> None:
    """One row, one key/value head, one split.

    Writes `parts` [P, T, H, E], `largest_of_parts` and `total_of_parts` [P, T, H]; without
    IS_SPLIT, `parts` is the output. A sink is part of the first split.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) == token:
        return
    heads = kv_head * GROUP + tl.arange(0, BLOCK_M)
    is_head = tl.arange(0, BLOCK_M) < GROUP
    dims = tl.arange(0, BLOCK_D)
    query_places = token.to(tl.int64) * query_token_stride + heads * query_head_stride
    q = tl.load(
        query + query_places[:, None] + dims[None, :],
        mask=is_head[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(COMPUTE_DTYPE)

    position = tl.load(num_computed_tokens + row)
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    tiles_per_split = tl.cdiv(tl.cdiv(position + 1 - first, BLOCK_N), tl.num_programs(2))
    first = first + split * tiles_per_split * BLOCK_N
    end = tl.minimum(first + tiles_per_split * BLOCK_N, position + 1)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        largest = tl.where(split == 0, sink, float("-inf"))
        total = tl.where((split == 0) & is_head, 1.0, 0.0)
    attended = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    attended, total, largest = attend_to_keys(
        q,
        attended,
        total,
        largest,
        tl.zeros([BLOCK_M], tl.int32) + position,
        first,
        end,
        block_tables + row * table_stride,
        key_pool + kv_head * HEAD_DIM,
        value_pool + kv_head * VALUE_DIM,
        key_block_stride,
        value_block_stride,
        score_scale,
        True,
        BLOCK_N,
        BLOCK_SIZE,
        NUM_KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        BLOCK_D,
        BLOCK_E,
        0,  # `first` is within the window
        SOFTCAP,
    )

    value_dims = tl.arange(0, BLOCK_E)
    # [P, T, H] flattened; [T, H] without splits, when `split` is 0.
    places = (split.to(tl.int64) * num_tokens + token) * (NUM_KV_HEADS * GROUP) + heads
    mask = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    if IS_SPLIT:
        tl.store(largest_of_parts + places, largest, mask=is_head)
        tl.store(total_of_parts + places, total, mask=is_head)
        # The sum of an empty split is not read.
        mask = mask & (first < end)
    else:
        attended = attended / total[:, None] * value_scale
    tl.store(
        parts + places[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(parts.dtype.element_ty),
        mask=mask,
    )
