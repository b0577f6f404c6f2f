"""Batched copies of whole KV blocks: within a pool, and between a pool and a staging buffer.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, sections 4.3 (copy-on-write) and 4.5 (swapping).

Shape letters: N blocks of a pool, W numbers of a block, P blocks that are copied.
"""

# Capital letters: what is known when a kernel is compiled.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE_SIZE = 4096


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies blocks `sources` [P] of `pool` [N, W] over blocks `destinations` [P], integers.

    A source may feed several destinations. No block may be both, nor a destination twice: then the
    order of the copies does not matter, and all reads come before all writes.
    """
    _copy(pool, sources, pool, destinations, sources.shape[0])


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copies blocks `block_ids` [P] of `pool` [N, W] to the first P rows of `staging` [>= P, W]."""
    _copy(pool, block_ids, staging, None, block_ids.shape[0])


def scatter_blocks(staging: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """Copies the first P rows of `staging` [>= P, W] over blocks `block_ids` [P] of `pool` [N, W].

    The ids are distinct.
    """
    _copy(staging, None, pool, block_ids, block_ids.shape[0])


def _copy(
    source: Tensor,
    source_ids: Tensor | None,
    destination: Tensor,
    destination_ids: Tensor | None,
    num_blocks: int,
) -> None:
    """Rows of two tensors [.., W] of one dtype, last stride 1; no ids stand for 0, 1, 2, .."""
    block_elements = source.shape[1]
    if num_blocks * block_elements == 0:
        return
    num_tiles = triton.cdiv(block_elements, _TILE_SIZE)
    _copy_kernel[(num_blocks * num_tiles,)](
        source,
        source if source_ids is None else source_ids,
        destination,
        destination if destination_ids is None else destination_ids,
        block_elements,
        num_tiles,
        source.stride(0),
        destination.stride(0),
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_DESTINATION_IDS=destination_ids is not None,
        TILE_SIZE=_TILE_SIZE,
        num_warps=8,
    )


@triton.jit
def _copy_kernel(
    source: tl.tensor,
    source_ids: tl.tensor,
    destination: tl.tensor,
    destination_ids: tl.tensor,
    block_elements: tl.tensor,
    num_tiles: tl.tensor,
    source_stride: tl.tensor,
    destination_stride: tl.tensor,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_DESTINATION_IDS: tl.constexpr,
    TILE_SIZE: tl.constexpr,
) -> None:
    """One tile of one block."""
    index = tl.program_id(0) // num_tiles
    elements = tl.program_id(0) % num_tiles * TILE_SIZE + tl.arange(0, TILE_SIZE)
    source_block = index
    if HAS_SOURCE_IDS:
        source_block = tl.load(source_ids + index)
    destination_block = index
    if HAS_DESTINATION_IDS:
        destination_block = tl.load(destination_ids + index)
    source += source_block.to(tl.int64) * source_stride
    destination += destination_block.to(tl.int64) * destination_stride
    mask = elements < block_elements
    tl.store(destination + elements, tl.load(source + elements, mask=mask), mask=mask)
