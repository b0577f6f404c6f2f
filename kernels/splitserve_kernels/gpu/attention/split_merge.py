"""Merges what the splits of a decode attention leave.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.

Shape letters: R rows, T tokens over all rows, H query heads, E size of a value head, P splits.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.paged_batch import PagedBatch


@dataclass(frozen=True, slots=True)
class SplitSums:
    """What each split saw: a weighted sum of values, its weights' sum, its largest score.

    `parts`: [P, T, H, E], `largest`, `total`: [P, T, H], all float32. Weights are powers of two of
    score - largest. A split that saw nothing has total 0, and its part may be anything.
    """

    parts: Tensor
    largest: Tensor
    total: Tensor


def merge_splits(sums: SplitSums, batch: PagedBatch, output: Tensor, value_scale: float) -> None:
    """Writes `output` [T, H, E], times `value_scale`. Rows have no more than one token."""
    num_splits, num_tokens, num_heads, value_dim = sums.parts.shape
    _merge_kernel[(batch.num_rows, num_heads)](
        sums.parts,
        sums.largest,
        sums.total,
        batch.query_starts,
        output,
        float(value_scale),
        num_tokens,
        num_splits,
        VALUE_DIM=value_dim,
        BLOCK_E=triton.next_power_of_2(value_dim),
        BLOCK_P=triton.next_power_of_2(num_splits),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _merge_kernel(
    parts: tl.tensor,
    largest_of_parts: tl.tensor,
    total_of_parts: tl.tensor,
    query_starts: tl.tensor,
    output: tl.tensor,
    value_scale: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """One row, one query head: all splits. Writes `output` [T, H, E]."""
    row = tl.program_id(0)
    token = tl.load(query_starts + row).to(tl.int64)
    if tl.load(query_starts + row + 1) == token:
        return
    splits = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_E)
    is_dim = dims < VALUE_DIM
    place = token * tl.num_programs(1) + tl.program_id(1)
    places = splits.to(tl.int64) * num_tokens * tl.num_programs(1) + place
    is_split = splits < num_splits
    largest = tl.load(largest_of_parts + places, mask=is_split, other=float("-inf"))
    total = tl.load(total_of_parts + places, mask=is_split, other=0.0)
    sums = tl.load(
        parts + places[:, None] * VALUE_DIM + dims[None, :],
        # Empty splits have total 0; NaN is not 0.
        mask=(is_split & (total != 0.0))[:, None] & is_dim[None, :],
        other=0.0,
    )
    weights = tl.exp2(largest - tl.max(largest, 0))
    attended = tl.sum(sums * weights[:, None], 0) / tl.sum(total * weights, 0) * value_scale
    tl.store(output + place * VALUE_DIM + dims, attended.to(output.dtype.element_ty), mask=is_dim)
