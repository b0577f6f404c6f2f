"""Merges what programs leave of rows whose keys they shared in a decode attention.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.

Shape letters: R rows, T tokens over all rows, H query heads, E size of a value head, P programs of
a key/value head.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.key_shares import (
    first_tile_of_row,
    tiles_in_sight,
    tiles_of_a_program,
)
from splitserve_kernels.paged_batch import PagedBatch

# Numbers of a program's tile, of so many parts: what the registers of four warps hold.
_TILE_SIZE = 8192
_MAX_PARTS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class ShareSums:
    """What each program saw of rows that are not its alone: at most its first row and its last.

    `parts`: [P, 2, H, E], weighted sums of values, `total`, `largest`: [P, 2, H], the weights' sums
    and the largest scores; all float32. Weights are powers of two of score - largest. Of a program,
    0 is the row that its share begins with, 1 another, that its share ends with.
    """

    parts: Tensor
    largest: Tensor
    total: Tensor

    @classmethod
    def empty(cls, num_programs: int, output: Tensor) -> ShareSums:
        """For `output` [T, H, E]; nothing is written yet, and what nobody writes is not read."""
        shape = (num_programs, 2, output.shape[1])
        parts = output.new_empty(*shape, output.shape[2], dtype=torch.float32)
        largest, total = output.new_empty(2, *shape, dtype=torch.float32)
        return cls(parts, largest, total)


def merge_shares(
    sums: ShareSums,
    batch: PagedBatch,
    output: Tensor,
    value_scale: float,
    *,
    num_rows: int,
    tile_size: int,
    window: int | None,
) -> None:
    """Writes the rows of `output` [T, H, E] that no program has whole, times `value_scale`.

    `num_rows`, `tile_size`, `window`: by which the programs shared the keys.
    """
    num_programs, _, num_heads, value_dim = sums.parts.shape
    block_e = triton.next_power_of_2(value_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, 512 // block_e))
    _merge_kernel[(num_rows, triton.cdiv(num_heads, block_h))](
        sums.parts,
        sums.largest,
        sums.total,
        batch.num_computed_tokens,
        batch.query_starts,
        output,
        float(value_scale),
        num_programs,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_H=block_h,
        BLOCK_E=block_e,
        BLOCK_P=min(_MAX_PARTS_AT_A_TIME, _TILE_SIZE // (block_h * block_e)),
        BLOCK_N=tile_size,
        WINDOW=window or 0,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_programs"])
def _merge_kernel(
    parts: tl.tensor,
    largest_of_parts: tl.tensor,
    total_of_parts: tl.tensor,
    num_computed_tokens: tl.tensor,
    query_starts: tl.tensor,
    output: tl.tensor,
    value_scale: tl.tensor,
    num_programs: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """One row, some query heads: all parts. Writes `output` [T, H, E]."""
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    num_row_tiles = tiles_in_sight(
        row, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    share, _ = tiles_of_a_program(
        num_programs, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW
    )
    row_tile = first_tile_of_row(row, num_rows, num_computed_tokens, query_starts, BLOCK_N, WINDOW)
    first = row_tile // share
    last = (row_tile + num_row_tiles - 1) // share
    # Without tiles there is no last one either.
    if last <= first:
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
        # Only the first program may have begun with another row.
        is_second = (programs == first) & (row_tile > first * share)
        places = (programs * 2 + is_second.to(tl.int32)).to(tl.int64)[:, None] * NUM_HEADS + heads
        part_largest = tl.load(largest_of_parts + places, mask=is_part, other=float("-inf"))
        part_total = tl.load(total_of_parts + places, mask=is_part, other=0.0)
        sums = tl.load(
            parts + places[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=is_part[:, :, None] & is_number[None, :, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        # Heads that pad the tile would subtract infinities.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(part_largest - shift[None, :])
        correction = tl.exp2(largest - shift)
        total = total * correction + tl.sum(part_total * weights, 0)
        attended = attended * correction[:, None] + tl.sum(sums * weights[:, :, None], 0)
        largest = new_largest
    attended = attended / tl.where(heads < NUM_HEADS, total, 1.0)[:, None] * value_scale
    token = tl.load(query_starts + row).to(tl.int64)
    places = (token * NUM_HEADS + heads)[:, None] * VALUE_DIM + dims[None, :]
    tl.store(output + places, attended.to(output.dtype.element_ty), mask=is_number)
