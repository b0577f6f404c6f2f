"""Division of keys among programs: every program attends to equally many keys.

The keys in sight of the rows of a batch are concatenated, in tiles; a row starts a new tile. A row
with more new tokens than a tile of queries holds occurs once for each of its tiles of queries, each
time with all keys that its last token sees. Program p takes the p-th of `num_programs` equal parts.
So many programs share a long row among short ones, a program takes several short rows, and the
device is full whatever the lengths are. Each program, and the merge of their sums, finds its rows
from data on the device: no launch depends on the lengths, and a CUDA graph replayed for other rows
divides their keys anew. Source: Sanovar et al., "Lean Attention", 2024, section 4; Osama et al.,
"Stream-K", PPoPP 2023.

Shape letters: R rows, Q tokens of a tile of queries.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

# Fewest tiles of a program: a program takes a microsecond or two until its first keys arrive.
MIN_TILES = tl.constexpr(2)
_ROWS_AT_A_TIME = tl.constexpr(512)
_QUERY_ROWS_AT_A_TIME = tl.constexpr(128)


@triton.jit
def key_tiles_in_sight(
    rows: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Returns the number of key tiles of each of `rows`, and its new tokens; 0 beyond the last row.

    A row without a token has no tile.
    """
    is_row = rows < num_rows
    starts = tl.load(query_starts + rows, mask=is_row, other=0)
    num_new = tl.load(query_starts + rows + 1, mask=is_row, other=0) - starts
    behind = tl.load(num_computed_tokens + rows, mask=is_row, other=0)
    if WINDOW > 0:
        behind = tl.minimum(behind, WINDOW - 1)
    return tl.where(num_new > 0, tl.cdiv(behind + num_new, BLOCK_N), 0), num_new


@triton.jit
def tiles_in_sight(
    rows: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Returns the number of key tiles of each of `rows`, summed over its tiles of queries."""
    key_tiles, num_new = key_tiles_in_sight(
        rows, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    return key_tiles * tl.cdiv(num_new, BLOCK_Q)


@triton.jit
def first_tile_of_row(
    row: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Returns the number of tiles of all rows before `row`."""
    row_tile = 0
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = first + tl.arange(0, _ROWS_AT_A_TIME)
        tiles = tiles_in_sight(
            rows, num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
        )
        row_tile += tl.sum(tl.where(rows < row, tiles, 0), 0)
    return row_tile


@triton.jit
def tiles_of_a_program(
    num_programs: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Returns the tiles of each program, and of all rows.

    The last programs may have fewer or none.
    """
    # The first tile of a row after the last one is the number of all tiles.
    num_tiles = first_tile_of_row(
        num_rows, num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
    )
    return tl.maximum(tl.cdiv(num_tiles, num_programs), MIN_TILES), num_tiles


@triton.jit
def row_of_tile(
    tile: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Returns the row that `tile` belongs to, and the first tile of that row."""
    row = 0
    row_tile = 0
    num_before = 0
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = first + tl.arange(0, _ROWS_AT_A_TIME)
        tiles = tiles_in_sight(
            rows, num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
        )
        ends = num_before + tl.cumsum(tiles, 0)
        is_before = (ends <= tile) & (rows < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
        row_tile = tl.maximum(row_tile, tl.max(tl.where(is_before, ends, 0), 0))
        num_before += tl.sum(tiles, 0)
    return row, row_tile


@triton.jit
def row_of_token(query_starts: tl.tensor, num_rows: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Returns the row of a token.

    The last row for tokens after all rows, -1 for tokens before all.
    """
    num_before = 0
    for first in range(0, num_rows, _QUERY_ROWS_AT_A_TIME):
        rows = first + tl.arange(0, _QUERY_ROWS_AT_A_TIME)
        starts = tl.load(query_starts + rows, mask=rows < num_rows, other=0)
        num_before += tl.sum(((rows < num_rows) & (starts <= token)).to(tl.int32), 0)
    return num_before - 1


@triton.jit
def place_in_row(
    tile: tl.tensor, num_key_tiles: tl.tensor, IS_DECODE: tl.constexpr, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """Returns the key tile of the `tile`-th tile of a row, and the first token of its queries."""
    key_tile = tile
    first_token = 0
    if not IS_DECODE:
        key_tile = tile % num_key_tiles
        first_token = tile // num_key_tiles * BLOCK_Q
    return key_tile, first_token


@triton.jit
def keys_of_share(
    begin: tl.tensor,
    stop: tl.tensor,
    num_computed: tl.tensor,
    first_token: tl.tensor,
    num_new: tl.tensor,
    IS_DECODE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Returns the positions that a tile of queries sees in a range of key tiles of its row.

    The range is `begin` .. `stop` - 1. The tile starts at the `first_token`-th of `num_new` tokens.
    Returns the first position, a position up to which all queries of the tile see all keys, and the
    end of the positions.
    """
    first = num_computed * 0
    if WINDOW > 0:
        first = tl.maximum(num_computed - WINDOW + 1, 0)
    position = num_computed + first_token
    start = first + begin * BLOCK_N
    end = num_computed + 1
    seam = start
    if not IS_DECODE:
        end = num_computed + tl.minimum(first_token + BLOCK_Q, num_new)
    end = tl.minimum(first + stop * BLOCK_N, end)
    if not IS_DECODE:
        if WINDOW > 0:
            # Keys behind the window of all queries of this tile are visible to an earlier tile
            # only.
            behind = tl.maximum(position - WINDOW + 1, 0) - first
            start = tl.maximum(start, first + behind // BLOCK_N * BLOCK_N)
            seam = start
        else:
            seam = tl.minimum(tl.maximum((position + 1) // BLOCK_N * BLOCK_N, start), end)
    return start, seam, end
