"""Which keys a program of a decode attends to: all programs get equally many, whoever's they are.

The keys that the rows of a batch have in sight are laid end to end, in tiles; a row begins a tile.
Program p has the p-th of as many equal parts as there are programs. So one long row among short
ones is shared by many programs, a program has several short rows, and the device is full whatever
the lengths are. Each program, and whoever puts its sums together, finds its rows by itself from
what lies on the device: nothing that is launched depends on the lengths, and a CUDA graph that is
replayed for other rows shares their keys anew. Source: Sanovar et al., "Lean Attention", 2024,
section 4; Osama et al., "Stream-K", PPoPP 2023.

Shape letters: R rows.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

# Fewer tiles are not worth a program: it costs a microsecond or two until the first keys come.
MIN_TILES = tl.constexpr(2)
_ROWS_AT_A_TIME = tl.constexpr(512)


@triton.jit
def tiles_in_sight(
    rows: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Tiles of keys that each of `rows` attends to; 0 beyond the last row and without a token."""
    is_row = rows < num_rows
    starts = tl.load(query_starts + rows, mask=is_row, other=0)
    ends = tl.load(query_starts + rows + 1, mask=is_row, other=0)
    in_sight = tl.load(num_computed_tokens + rows, mask=is_row, other=0) + 1
    if WINDOW > 0:
        in_sight = tl.minimum(in_sight, WINDOW)
    return tl.where(starts < ends, tl.cdiv(in_sight, BLOCK_N), 0)


@triton.jit
def first_tile_of_row(
    row: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Tiles of all rows before `row`."""
    row_tile = 0
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = first + tl.arange(0, _ROWS_AT_A_TIME)
        tiles = tiles_in_sight(rows, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW)
        row_tile += tl.sum(tl.where(rows < row, tiles, 0), 0)
    return row_tile


@triton.jit
def tiles_of_a_program(
    num_programs: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Tiles of each program, and of all rows; the last program may have fewer, or none."""
    # As if there were one more row.
    num_tiles = first_tile_of_row(
        num_rows, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    return tl.maximum(tl.cdiv(num_tiles, num_programs), MIN_TILES), num_tiles


@triton.jit
def row_of_tile(
    tile: tl.tensor,
    num_rows: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """The row that `tile` belongs to, and that row's first tile."""
    row = 0
    row_tile = 0
    num_before = 0
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = first + tl.arange(0, _ROWS_AT_A_TIME)
        tiles = tiles_in_sight(rows, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW)
        ends = num_before + tl.cumsum(tiles, 0)
        is_before = (ends <= tile) & (rows < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
        row_tile = tl.maximum(row_tile, tl.max(tl.where(is_before, ends, 0), 0))
        num_before += tl.sum(tiles, 0)
    return row, row_tile
