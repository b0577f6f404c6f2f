"""Batched copies of whole KV blocks within a pool.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.3 (copy-on-write).

Shape letters: N blocks of a pool, W numbers of a block, P copied blocks.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.integers import ceil_div

_TILE_SIZE = 4096


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies the blocks `sources` [P] of `pool` [N, W] to the blocks `destinations` [P], integers.

    The last stride of `pool` is 1. A source may have several destinations. No block may be both
    source and destination, and none may be a destination twice: so the order of copies does not
    matter, and all reads come before all writes.
    """
    num_blocks, block_elements = sources.shape[0], pool.shape[1]
    if num_blocks * block_elements == 0:
        return
    num_tiles = ceil_div(block_elements, _TILE_SIZE)
    _copy_kernel[(num_blocks * num_tiles,)](
        pool,
        sources,
        destinations,
        block_elements,
        num_tiles,
        pool.stride(0),
        TILE_SIZE=_TILE_SIZE,
        num_warps=8,
    )


@triton.jit
def _copy_kernel(
    pool: tl.tensor,
    sources: tl.tensor,
    destinations: tl.tensor,
    block_elements: tl.tensor,
    num_tiles: tl.tensor,
    stride: tl.tensor,
    TILE_SIZE: tl.constexpr,
) -> None:
    """Copies one tile of one block."""
    index = tl.program_id(0) // num_tiles
    elements = tl.program_id(0) % num_tiles * TILE_SIZE + tl.arange(0, TILE_SIZE)
    source = pool + tl.load(sources + index).to(tl.int64) * stride
    destination = pool + tl.load(destinations + index).to(tl.int64) * stride
    mask = elements < block_elements
    tl.store(destination + elements, tl.load(source + elements, mask=mask), mask=mask)
