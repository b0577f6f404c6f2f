"""Paged attention for few queries, with the keys divided equally among programs.

If a program has only some keys of a tile of queries, it stores an unnormalised sum, its softmax
total and its largest score, and a second kernel merges these per tile. A tile that one program sees
as a whole is finished by that program. So a decode, or a few new tokens, behind a long context is
computed by as many programs as the device runs. Sources: Dao et al., "Flash-Decoding for
long-context inference", 2023; Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", SOSP 2023; for the division of keys, `key_shares`.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a query
or key head, E size of a value head, P programs of a key/value head, M queries of a tile, padded: Q
tokens times heads of a group.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.key_shares import (
    key_tiles_in_sight,
    keys_of_share,
    place_in_row,
    row_of_tile,
    tiles_of_a_program,
)
from splitserve_kernels.gpu.attention.share_merge import SharedRows, ShareSums, merge_shares
from splitserve_kernels.gpu.attention.tile_sizes import (
    TileSizes,
    decode_tile_sizes,
    num_programs_at_once,
    prefill_tile_sizes,
    target_of,
)
from splitserve_kernels.gpu.attention.tiles import (
    AttentionConstants,
    attend_to_keys,
    attention_constants,
    load_queries,
    nothing_attended,
    shared_arguments,
    store_attended,
    store_lines,
)
from splitserve_kernels.gpu.launch import LayerPools, ceil_div
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch


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
    """Computes `reference.paged_attention` for the first `num_rows` rows, of at most one new token.

    `query`: [T, H, D], last stride 1. Writes the tokens of these rows in `output` [T, H, E], which
    is contiguous. Launches depend on shapes and on the device only, so that a CUDA graph can record
    them. `num_programs`: number of programs that share the keys of each key/value head; None for as
    many as the device runs at a time.
    """
    if num_rows == 0:
        return
    constants = attention_constants(query, pools, options)
    sizes = decode_tile_sizes(constants, target_of(query.device))
    rows = SharedRows(0, num_rows, block_q=1, is_decode=True)
    _attend(query, pools, batch, options, output, constants, sizes, rows, num_programs)


def paged_split_prefill(
    query: Tensor,
    pools: LayerPools,
    batch: PagedBatch,
    options: AttentionOptions,
    output: Tensor,
    *,
    first_row: int = 0,
    num_programs: int | None = None,
) -> None:
    """Computes the rows from `first_row` on, of any number of new tokens, with shared keys.

    Arguments and output are those of `paged_prefill`, which it outperforms if the tiles of queries
    do not fill the device.
    """
    num_rows, num_tokens = batch.num_rows - first_row, query.shape[0]
    if num_rows == 0 or num_tokens == 0:
        return
    constants = attention_constants(query, pools, options)
    sizes = prefill_tile_sizes(constants, batch.max_num_new_tokens, target_of(query.device))
    block_q = sizes.num_queries // sizes.num_heads
    rows = SharedRows(first_row, num_rows, block_q)
    _attend(query, pools, batch, options, output, constants, sizes, rows, num_programs)


def _attend(
    query: Tensor,
    pools: LayerPools,
    batch: PagedBatch,
    options: AttentionOptions,
    output: Tensor,
    constants: AttentionConstants,
    sizes: TileSizes,
    rows: SharedRows,
    num_programs: int | None,
) -> None:
    num_head_tiles = ceil_div(constants["GROUP"], sizes.num_heads)
    if num_programs is None:
        at_once = num_programs_at_once(query.device, constants, sizes)
        num_programs = max(1, at_once // (pools.num_kv_heads * num_head_tiles))
    shared = shared_arguments(query, pools, batch, options, output)
    sums = ShareSums.empty(num_programs, rows.block_q, output)
    _decode_kernel[(num_programs, pools.num_kv_heads * num_head_tiles)](
        *shared.tensors,
        sums.parts,
        sums.largest,
        sums.total,
        *shared.scales,
        rows.first_row,
        rows.num_rows,
        *shared.strides,
        IS_DECODE=rows.is_decode,
        BLOCK_M=sizes.num_queries,
        BLOCK_Q=rows.block_q,
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
        rows=rows,
        tile_size=sizes.num_keys,
        window=options.sliding_window,
    )


@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride"])
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
    first_row: tl.tensor,
    num_rows: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    table_stride: tl.tensor,
    IS_DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
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
    """Attends with the p-th share of keys for some heads of a group, one tile of queries at a time.

    Writes `output` [T, H, E] for tiles whose keys are all in the share; for other tiles writes
    `parts` [P, 2, Q, H, E], `largest_of_parts` and `total_of_parts` [P, 2, Q, H], as `ShareSums`
    describes. A sink is part of the first tile of keys. IS_DECODE: no row has more than one token.
    """
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    if not IS_DECODE:
        num_computed_tokens += first_row
        query_starts += first_row
        block_tables += first_row.to(tl.int64) * table_stride
    share, num_tiles = tiles_of_a_program(
        tl.num_programs(0), num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
    )
    first_tile = program * share
    end_tile = tl.minimum(first_tile + share, num_tiles)
    if first_tile >= end_tile:
        return
    row, row_tile = row_of_tile(
        first_tile, num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
    )
    stacked = tl.arange(0, BLOCK_M)
    token_of_tile = stacked // HEADS
    head_of_group = tl.program_id(1) % HEAD_TILES * HEADS + stacked % HEADS
    is_line = (stacked < BLOCK_Q * HEADS) & (head_of_group < GROUP)
    heads = kv_head * GROUP + head_of_group

    tile = first_tile
    while tile < end_tile:
        num_key_tiles, num_new = key_tiles_in_sight(
            row, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
        )
        num_row_tiles = num_key_tiles * tl.cdiv(num_new, BLOCK_Q)
        # A row without a token has no tile.
        if tile < row_tile + num_row_tiles:
            begin, first_token = place_in_row(tile - row_tile, num_key_tiles, IS_DECODE, BLOCK_Q)
            stop = tl.minimum(begin + end_tile - tile, num_key_tiles)
            tokens = (tl.load(query_starts + row) + first_token + token_of_tile).to(tl.int64)
            num_computed = tl.load(num_computed_tokens + row)
            is_query, positions = _queries_of_tile(
                is_line, token_of_tile, first_token, num_computed, num_new, IS_DECODE
            )
            q = load_queries(
                query,
                tokens,
                heads,
                is_query,
                query_token_stride,
                query_head_stride,
                HEAD_DIM,
                BLOCK_D,
                COMPUTE_DTYPE,
            )
            attended, total, largest = nothing_attended(
                sinks, heads, is_query, begin, BLOCK_M, BLOCK_E, HAS_SINKS
            )
            start, seam, end = keys_of_share(
                begin,
                stop,
                num_computed,
                first_token,
                num_new,
                IS_DECODE,
                BLOCK_Q,
                BLOCK_N,
                WINDOW,
            )
            # Before the seam, all queries see all keys.
            for is_masked in tl.static_range(1 if IS_DECODE or WINDOW > 0 else 0, 2):
                attended, total, largest = attend_to_keys(
                    q,
                    attended,
                    total,
                    largest,
                    positions,
                    seam if is_masked else start,
                    end if is_masked else seam,
                    block_tables + row.to(tl.int64) * table_stride,
                    key_pool + kv_head * HEAD_DIM,
                    value_pool + kv_head * VALUE_DIM,
                    key_block_stride,
                    value_block_stride,
                    score_scale,
                    is_masked,
                    BLOCK_N,
                    BLOCK_SIZE,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    VALUE_DIM,
                    BLOCK_D,
                    BLOCK_E,
                    0 if IS_DECODE else WINDOW,  # the `first` of a decode is within the window
                    SOFTCAP,
                )
            if stop - begin == num_key_tiles:
                offsets = tokens * (NUM_KV_HEADS * GROUP) + heads
                store_attended(
                    output, offsets, attended, total, value_scale, is_query, VALUE_DIM, BLOCK_E
                )
            else:
                # The first tile of queries of the share, or its last.
                line = (program * 2 + (tile > first_tile).to(tl.int32)) * BLOCK_Q + token_of_tile
                offsets = line.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
                tl.store(largest_of_parts + offsets, largest, mask=is_query)
                tl.store(total_of_parts + offsets, total, mask=is_query)
                store_lines(parts, offsets, attended, is_query, VALUE_DIM, BLOCK_E)
            tile += stop - begin
        if tile == row_tile + num_row_tiles:
            row_tile += num_row_tiles
            row += 1


@triton.jit
def _queries_of_tile(
    is_line: tl.tensor,
    token_of_tile: tl.tensor,
    first_token: tl.tensor,
    num_computed: tl.tensor,
    num_new: tl.tensor,
    IS_DECODE: tl.constexpr,
) -> tl.tensor:
    """Returns which lines of a tile hold queries, and the positions of the queries; both [M]."""
    is_query = is_line
    positions = tl.zeros_like(token_of_tile) + num_computed
    # A decode computes nothing that it does not need, which decides how many programs run at a
    # time.
    if not IS_DECODE:
        is_query = is_line & (first_token + token_of_tile < num_new)
        positions += first_token + token_of_tile
    return is_query, positions
