"""Merge of the partial sums of queries whose keys programs shared.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.

Shape letters: R rows, T tokens over all rows, H query heads, E size of a value head, P programs of
a key/value head, Q tokens of a tile of queries.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.key_shares import (
    first_tile_of_row,
    key_tiles_in_sight,
    row_of_token,
    tiles_of_a_program,
)
from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2
from splitserve_kernels.paged_batch import PagedBatch

# Numbers in a program's tile, and the limit of parts in it: what the registers of four warps hold.
_TILE_SIZE = 8192
_MAX_PARTS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a batch whose keys programs share: `num_rows` rows from `first_row` on.

    `block_q`: Q. If `is_decode`, no row has more than one token.
    """

    first_row: int
    num_rows: int
    block_q: int
    is_decode: bool = False


@dataclass(frozen=True, slots=True)
class ShareSums:
    """Partial softmax sums of each program for tiles that it shares: its first and its last tile.

    `parts`: [P, 2, Q, H, E], weighted sums of values; `total`, `largest`: [P, 2, Q, H], sums of
    weights and largest scores; all float32. Weights are 2 ** (score - largest). Index 0 of a
    program is the tile that its share starts with, index 1 another tile that its share ends with.
    """

    parts: Tensor
    largest: Tensor
    total: Tensor

    @classmethod
    def empty(cls, num_programs: int, block_q: int, output: Tensor) -> ShareSums:
        """Allocates sums for `output` [T, H, E], uninitialised; unwritten parts are never read."""
        shape = (num_programs, 2, block_q, output.shape[1])
        parts = output.new_empty(*shape, output.shape[2], dtype=torch.float32)
        largest, total = output.new_empty(2, *shape, dtype=torch.float32)
        return cls(parts, largest, total)


def merge_shares(
    sums: ShareSums,
    batch: PagedBatch,
    output: Tensor,
    value_scale: float,
    *,
    rows: SharedRows,
    tile_size: int,
    window: int | None,
) -> None:
    """Writes the tokens of `output` [T, H, E] that programs share, times `value_scale`.

    `rows`, `tile_size`, `window`: the values with which the programs divided the keys.
    """
    num_programs, _, block_q, num_heads, value_dim = sums.parts.shape
    block_e = next_power_of_2(value_dim)
    block_h = min(next_power_of_2(num_heads), max(1, 512 // block_e))
    num_tokens = rows.num_rows if rows.is_decode else output.shape[0]
    _merge_kernel[(num_tokens, ceil_div(num_heads, block_h))](
        sums.parts,
        sums.largest,
        sums.total,
        batch.num_computed_tokens,
        batch.query_starts,
        output,
        float(value_scale),
        num_programs,
        rows.first_row,
        rows.num_rows,
        IS_DECODE=rows.is_decode,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_H=block_h,
        BLOCK_E=block_e,
        BLOCK_P=min(_MAX_PARTS_AT_A_TIME, _TILE_SIZE // (block_h * block_e)),
        BLOCK_Q=block_q,
        BLOCK_N=tile_size,
        WINDOW=window or 0,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_programs", "first_row", "num_rows"])
def _merge_kernel(
    parts: tl.tensor,
    largest_of_parts: tl.tensor,
    total_of_parts: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    output: tl.tensor,
    value_scale: tl.tensor,
    num_programs: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    IS_DECODE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Merges the parts of one token for some query heads. Writes `output` [T, H, E]."""
    num_computed_tokens += first_row
    query_starts += first_row
    row = tl.program_id(0)
    token_of_row = 0
    if not IS_DECODE:
        token = tl.program_id(0)
        row = row_of_token(query_starts, num_rows, token)
        if row < 0:
            return
        token_of_row = token - tl.load(query_starts + row)
    num_key_tiles, num_new = key_tiles_in_sight(
        row, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    tile_of_row, token_of_tile = token_of_row // BLOCK_Q, token_of_row % BLOCK_Q
    # One program has all keys of a single tile.
    if (num_key_tiles <= 1) | (token_of_row >= num_new):
        return
    share, _ = tiles_of_a_program(
        num_programs, num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
    )
    first_tile = tile_of_row * num_key_tiles + first_tile_of_row(
        row, num_rows, num_computed_tokens, query_starts, BLOCK_Q, BLOCK_N, WINDOW
    )
    first = first_tile // share
    last = (first_tile + num_key_tiles - 1) // share
    if last == first:
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_E)
    is_number = (heads < NUM_HEADS)[:, None] & (dims < VALUE_DIM)[None, :]
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    attended = tl.zeros([BLOCK_H, BLOCK_E], tl.float32)
    for start in range(first, last + 1, BLOCK_P):
        programs = start + tl.arange(0, BLOCK_P)
        is_part = (programs <= last)[:, None] & (heads < NUM_HEADS)[None, :]
        # Only the first program may have started with other queries.
        is_second = (programs == first) & (first_tile > first * share)
        lines = (programs * 2 + is_second.to(tl.int32)) * BLOCK_Q + token_of_tile
        offsets = lines.to(tl.int64)[:, None] * NUM_HEADS + heads
        part_largest = tl.load(largest_of_parts + offsets, mask=is_part, other=float("-inf"))
        part_total = tl.load(total_of_parts + offsets, mask=is_part, other=0.0)
        sums = tl.load(
            parts + offsets[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=is_part[:, :, None] & is_number[None, :, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        # Avoids subtracting infinities for padding heads.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(part_largest - shift[None, :])
        correction = tl.exp2(largest - shift)
        total = total * correction + tl.sum(part_total * weights, 0)
        attended = attended * correction[:, None] + tl.sum(sums * weights[:, :, None], 0)
        largest = new_largest
    attended = attended / tl.where(heads < NUM_HEADS, total, 1.0)[:, None] * value_scale
    offsets = ((tl.load(query_starts + row) + token_of_row).to(tl.int64) * NUM_HEADS + heads)[
        :, None
    ] * VALUE_DIM + dims[None, :]
    tl.store(output + offsets, attended.to(output.dtype.element_ty), mask=is_number)
