"""Paged attention of rows with one new token each: all programs have equally many keys.

A program may have some keys of a row only. Then it leaves an unnormalised sum, its softmax total
and its largest score, and a second kernel merges those of the row; what one program saw whole it
finishes itself. Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023;
of the shares, `key_shares`.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a query
or key head, E size of a value head, P programs of a key/value head, M heads of a tile, padded.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.key_shares import (
    row_of_tile,
    tiles_in_sight,
    tiles_of_a_program,
)
from splitserve_kernels.gpu.attention.occupancy import num_programs_at_once
from splitserve_kernels.gpu.attention.share_merge import ShareSums, merge_shares
from splitserve_kernels.gpu.attention.tile_sizes import decode_tile_sizes
from splitserve_kernels.gpu.attention.tiles import (
    LOG2_E,
    attend_to_keys,
    attention_constants,
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
    output: Tensor,
    *,
    num_rows: int,
    num_programs: int | None = None,
) -> None:
    """`reference.paged_attention` for the first `num_rows` rows, of one new token each, or none.

    `query`: [T, H, D], last stride 1. Writes the tokens of these rows in `output` [T, H, E], which
    is contiguous. What is launched depends on shapes and on the device only, so that a CUDA graph
    can record it. `num_programs`: how many share the keys of each key/value head; None for as many
    as the device runs at a time.
    """
    if num_rows == 0:
        return
    constants = attention_constants(query, pools, options)
    sizes = decode_tile_sizes(constants)
    num_head_tiles = triton.cdiv(constants["GROUP"], sizes.num_heads)
    if num_programs is None:
        at_once = num_programs_at_once(query.device, constants, sizes)
        num_programs = max(1, at_once // (pools.num_kv_heads * num_head_tiles))
    sums = ShareSums.empty(num_programs, output)
    _decode_kernel[(num_programs, pools.num_kv_heads * num_head_tiles)](
        query,
        pools.key,
        pools.value,
        batch.block_tables,
        batch.num_computed_tokens,
        batch.query_starts,
        output if options.sinks is None else options.sinks,
        output,
        sums.parts,
        sums.largest,
        sums.total,
        score_scale(pools, options),
        float(pools.scales.value),
        num_rows,
        query.stride(0),
        query.stride(1),
        pools.key.stride(0),
        pools.value.stride(0),
        batch.block_tables.stride(0),
        BLOCK_M=sizes.num_queries,
        HEADS=sizes.num_heads,
        HEAD_TILES=num_head_tiles,
        BLOCK_N=sizes.num_keys,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **constants,
    )
    merge_shares(
        sums,
        batch,
        output,
        pools.scales.value,
        num_rows=num_rows,
        tile_size=sizes.num_keys,
        window=options.sliding_window,
    )


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _decode_kernel(
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    block_tables: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    largest_of_parts: tl.tensor,
    total_of_parts: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    num_rows: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
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
    """The p-th share of the keys, some heads of one group, row by row.

    Writes `output` [T, H, E] for rows that the share holds whole, and for others `parts`
    [P, 2, H, E], `largest_of_parts` and `total_of_parts` [P, 2, H], as `ShareSums` says. A sink is
    part of a row's first tile.
    """
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    share, num_tiles = tiles_of_a_program(
        tl.num_programs(0), num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    first_tile = program * share
    end_tile = tl.minimum(first_tile + share, num_tiles)
    if first_tile >= end_tile:
        return
    row, row_tile = row_of_tile(
        first_tile, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    head_of_group = tl.program_id(1) % HEAD_TILES * HEADS + tl.arange(0, BLOCK_M)
    is_head = (tl.arange(0, BLOCK_M) < HEADS) & (head_of_group < GROUP)
    heads = kv_head * GROUP + head_of_group
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_E)

    tile = first_tile
    while tile < end_tile:
        num_row_tiles = tiles_in_sight(
            row, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
        )
        begin = tile - row_tile
        stop = tl.minimum(end_tile - row_tile, num_row_tiles)
        # A row without a token has no tile.
        if begin < stop:
            token = tl.load(query_starts + row).to(tl.int64)
            position = tl.load(num_computed_tokens + row)
            first = position * 0
            if WINDOW > 0:
                first = tl.maximum(position - WINDOW + 1, 0)
            query_places = token * query_token_stride + heads * query_head_stride
            q = tl.load(
                query + query_places[:, None] + dims[None, :],
                mask=is_head[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            ).to(COMPUTE_DTYPE)
            largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
                largest = tl.where(begin == 0, sink, float("-inf"))
                total = tl.where((begin == 0) & is_head, 1.0, 0.0)
            attended = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
            attended, total, largest = attend_to_keys(
                q,
                attended,
                total,
                largest,
                tl.zeros([BLOCK_M], tl.int32) + position,
                first + begin * BLOCK_N,
                tl.minimum(first + stop * BLOCK_N, position + 1),
                block_tables + row.to(tl.int64) * table_stride,
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
            mask = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
            if stop - begin == num_row_tiles:
                places = token * (NUM_KV_HEADS * GROUP) + heads
                attended = attended / total[:, None] * value_scale
                tl.store(
                    output + places[:, None] * VALUE_DIM + value_dims[None, :],
                    attended.to(output.dtype.element_ty),
                    mask=mask,
                )
            else:
                # The share's first row, or else its last.
                place = program * 2 + (tile > first_tile).to(tl.int32)
                places = place.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
                tl.store(largest_of_parts + places, largest, mask=is_head)
                tl.store(total_of_parts + places, total, mask=is_head)
                tl.store(
                    parts + places[:, None] * VALUE_DIM + value_dims[None, :], attended, mask=mask
                )
            tile = row_tile + stop
        row_tile += num_row_tiles
        row += 1
