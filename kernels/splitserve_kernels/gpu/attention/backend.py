"""KV-cache writes and paged attention on a GPU: the operations of `reference` in Triton.

Here are rows with any number of new tokens, after any number of computed ones; `paged_decode` has
rows of few new tokens. A program takes a tile of tokens of one row, stacked with the query heads
that share one key/value head: each key is loaded once for all M queries. Sources: Dao,
"FlashAttention-2", 2023, section 3; Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", SOSP 2023.

Shape letters: R rows, T tokens over all rows, H query heads, G key/value heads, D size of a query
or key head, E size of a value head, B block size, N blocks of the pool, M queries of a tile, Q = M
// (H / G) tokens of a tile.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.overlapped import attend_overlapped
from splitserve_kernels.gpu.attention.paged_decode import paged_decode, paged_split_prefill
from splitserve_kernels.gpu.attention.tile_sizes import (
    num_multiprocessors,
    prefill_tile_sizes,
    target_of,
)
from splitserve_kernels.gpu.attention.tiles import (
    attend_to_keys,
    attention_constants,
    load_queries,
    nothing_attended,
    shared_arguments,
    store_attended,
)
from splitserve_kernels.gpu.kv_write import kv_write, with_dense_heads
from splitserve_kernels.gpu.launch import LayerPools, ceil_div
from splitserve_kernels.paged_batch import UNIT_SCALES, AttentionOptions, KVScales, PagedBatch

_ROWS_AT_A_TIME = tl.constexpr(128)


def leaves_room(
    query: Tensor, pools: LayerPools, batch: PagedBatch, options: AttentionOptions
) -> bool:
    """Returns whether `paged_prefill` would leave half of the device idle, or more.

    A few tokens after a long context are then faster if programs share their keys. Decided by
    shapes alone: while a CUDA graph is recorded, only the device knows the lengths. `query`: [T, H,
    D].
    """
    constants = attention_constants(query, pools, options)
    target = target_of(query.device)
    sizes = prefill_tile_sizes(constants, batch.max_num_new_tokens, target)
    num_tokens = query.shape[0] - batch.num_decodes
    num_tiles = ceil_div(num_tokens, sizes.num_queries // sizes.num_heads)
    num_programs = num_tiles * pools.num_kv_heads * ceil_div(constants["GROUP"], sizes.num_heads)
    return bool(2 * num_programs <= num_multiprocessors(query.device))


def paged_prefill(
    query: Tensor,
    pools: LayerPools,
    batch: PagedBatch,
    options: AttentionOptions,
    output: Tensor,
    *,
    first_row: int = 0,
) -> None:
    """Computes `reference.paged_attention` for the rows from `first_row` on.

    These rows have any number of new tokens, earlier rows at most one. `query`: [T, H, D], last
    stride 1. Writes the tokens of these rows in `output` [T, H, E], which is contiguous. Launches
    depend only on shapes, on `first_row` and on `batch.max_num_new_tokens`.
    """
    num_rows, num_tokens = batch.num_rows - first_row, query.shape[0]
    if num_rows == 0 or num_tokens == 0:
        return
    constants = attention_constants(query, pools, options)
    target = target_of(query.device)
    sizes = prefill_tile_sizes(constants, batch.max_num_new_tokens, target)
    block_q = sizes.num_queries // sizes.num_heads
    num_head_tiles = ceil_div(constants["GROUP"], sizes.num_heads)
    # Upper bound of the tiles of all rows, whatever the lengths: see `_find_row`.
    num_tiles = num_tokens // block_q + num_rows
    shared = shared_arguments(query, pools, batch, options, output)
    _prefill_kernel[(num_tiles, pools.num_kv_heads * num_head_tiles)](
        *shared.tensors,
        *shared.scales,
        first_row,
        num_rows,
        *shared.strides,
        BLOCK_M=sizes.num_queries,
        BLOCK_Q=block_q,
        HEADS=sizes.num_heads,
        HEAD_TILES=num_head_tiles,
        BLOCK_N=sizes.num_keys,
        # Float8 keys are converted first, and products wait for that.
        OVERLAPS=sizes.overlaps and not pools.is_float8,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **constants,
    )


@triton.jit
def _find_row(
    query_starts: tl.tensor,
    first_start: tl.tensor,
    num_rows: tl.tensor,
    tile: tl.tensor,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Returns the row that the `tile`-th tile of queries belongs to; rows begin at `first_start`.

    The r-th row, whose first token is the s-th of all tokens, has the tiles from s // Q + r on.
    These are enough for its tiles, of which only the last has fewer than Q tokens, so a tile may
    contain no token of its row.
    """
    num_before = 0
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = first + tl.arange(0, _ROWS_AT_A_TIME)
        starts = tl.load(query_starts + rows, mask=rows < num_rows, other=0) - first_start
        is_before = (rows < num_rows) & (starts // BLOCK_Q + rows <= tile)
        num_before += tl.sum(is_before.to(tl.int32), 0)
    return num_before - 1


@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride"])
def _prefill_kernel(
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    block_tables: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
    """Attends with Q tokens of one row for some heads of a group. Writes `output` [T, H, E]."""
    # The last tiles of a row see the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    # Earlier rows may have no token: only the device knows how many tokens they have.
    first_start = tl.load(query_starts + first_row)
    index = _find_row(query_starts + first_row, first_start, num_rows, tile, BLOCK_Q)
    row = first_row + index
    row_start = tl.load(query_starts + row)
    num_new = tl.load(query_starts + row + 1) - row_start
    first_token = (tile - (row_start - first_start) // BLOCK_Q - index) * BLOCK_Q
    if first_token >= num_new:
        return
    stacked = tl.arange(0, BLOCK_M)
    tokens = first_token + stacked // HEADS
    head_of_group = tl.program_id(1) % HEAD_TILES * HEADS + stacked % HEADS
    heads = kv_head * GROUP + head_of_group
    is_query = (stacked < BLOCK_Q * HEADS) & (head_of_group < GROUP) & (tokens < num_new)
    offsets = (row_start + tokens).to(tl.int64)
    q = load_queries(
        query,
        offsets,
        heads,
        is_query,
        query_token_stride,
        query_head_stride,
        HEAD_DIM,
        BLOCK_D,
        COMPUTE_DTYPE,
    )

    num_computed = tl.load(num_computed_tokens + row)
    position = num_computed + first_token
    end = num_computed + tl.minimum(first_token + BLOCK_Q, num_new)
    # Between the seams, all queries see all keys: they are in the window of the last query, which
    # begins last, and none is after the first query.
    first = position * 0
    seam = first
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
        num_behind = tl.maximum(end - WINDOW - first, 0)
        seam = tl.minimum(first + tl.cdiv(num_behind, BLOCK_N) * BLOCK_N, end)
    last_seam = seam + tl.maximum(position + 1 - seam, 0) // BLOCK_N * BLOCK_N

    attended, total, largest = nothing_attended(
        sinks, heads, is_query, 0, BLOCK_M, BLOCK_E, HAS_SINKS
    )
    if OVERLAPS:
        attended, total, largest = attend_overlapped(
            q,
            attended,
            total,
            largest,
            num_computed + tokens,
            first,
            seam,
            last_seam,
            end,
            block_tables + row.to(tl.int64) * table_stride,
            key_pool + kv_head * HEAD_DIM,
            value_pool + kv_head * VALUE_DIM,
            key_block_stride,
            value_block_stride,
            score_scale,
            BLOCK_N,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_E,
            WINDOW,
            SOFTCAP,
        )
    else:
        for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
            attended, total, largest = attend_to_keys(
                q,
                attended,
                total,
                largest,
                num_computed + tokens,
                first if part == 0 else (seam if part == 1 else last_seam),
                seam if part == 0 else (last_seam if part == 1 else end),
                block_tables + row.to(tl.int64) * table_stride,
                key_pool + kv_head * HEAD_DIM,
                value_pool + kv_head * VALUE_DIM,
                key_block_stride,
                value_block_stride,
                score_scale,
                part != 1,
                BLOCK_N,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_D,
                BLOCK_E,
                WINDOW,
                SOFTCAP,
            )

    offsets = offsets * (NUM_KV_HEADS * GROUP) + heads
    store_attended(output, offsets, attended, total, value_scale, is_query, VALUE_DIM, BLOCK_E)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: PagedBatch,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Writes the keys and values of all input tokens into their slots.

    `key`: [T, G, D], `value`: [T, G, E]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E], see
    LayerPools, written in place. Raises ValueError for a pool of another layout.
    """
    kv_write(key, value, LayerPools(key_pool, value_pool, scales), batch.slot_mapping)


def paged_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """Computes causal attention of every input token over the tokens of its row, itself included.

    `query`: [T, H, D]. `key_pool`: [N, B, G, D], `value_pool`: [N, B, G, E], see LayerPools.
    Returns [T, H, E] in the dtype of `query`. Raises ValueError for a pool of another layout.

    Reads the same slots as `reference`. Scores, softmax and the weighted sum are float32, but
    weights are rounded to the dtype of the query before they are multiplied with values.
    """
    query = with_dense_heads(query)
    pools = LayerPools(key_pool, value_pool, scales)
    output = query.new_empty(query.shape[0], query.shape[1], value_pool.shape[3])
    if batch.max_num_new_tokens <= 1:
        paged_decode(query, pools, batch, options, output, num_rows=batch.num_rows)
        return output
    # In a prefill tile, one program would read all keys of a decode.
    paged_decode(query, pools, batch, options, output, num_rows=batch.num_decodes)
    attend = paged_split_prefill if leaves_room(query, pools, batch, options) else paged_prefill
    attend(query, pools, batch, options, output, first_row=batch.num_decodes)
    return output
