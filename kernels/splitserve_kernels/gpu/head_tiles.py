"""Shared code of the kernels that write keys and values: several heads of one token at a time.

Shape letters: h heads of a tile, D size of a head.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.integers import next_power_of_2
from splitserve_kernels.gpu.layer_pools import FLOAT8_MAX

# Numbers that a program processes at a time.
_TILE_SIZE = 1024
_FLOAT8_MAX = tl.constexpr(FLOAT8_MAX)


def heads_per_tile(num_heads: int, head_dim: int) -> int:
    """Returns a power of two, at most `num_heads` rounded up to a power of two."""
    most = max(1, _TILE_SIZE // next_power_of_2(head_dim))
    count: int = min(most, next_power_of_2(num_heads))
    return count


def with_dense_heads(heads: Tensor) -> Tensor:
    """Returns `heads` [.., D], copied if the numbers of a head are not contiguous."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


@triton.jit
def store_rounded(destination: tl.tensor, numbers: tl.tensor, mask: tl.tensor) -> None:
    """Stores float32 numbers in the dtype of `destination`; clamps to the range of float8.

    NaN stays NaN.
    """
    if destination.dtype.element_ty == tl.float8e4nv:
        numbers = tl.where(numbers > _FLOAT8_MAX, _FLOAT8_MAX, numbers)
        numbers = tl.where(numbers < -_FLOAT8_MAX, -_FLOAT8_MAX, numbers)
    tl.store(destination, numbers.to(destination.dtype.element_ty), mask=mask)


@triton.jit
def copy_heads(
    source: tl.tensor,
    source_head_stride: tl.tensor,
    destination: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copies dimensions FIRST_DIM .. HEAD_DIM - 1 of `heads` [h], times `scale`.

    The heads of `destination` are contiguous.
    """
    dims = FIRST_DIM + tl.arange(0, BLOCK)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    numbers = tl.load(
        source + heads[:, None] * source_head_stride + dims[None, :], mask=mask, other=0.0
    )
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    store_rounded(destination + places, numbers.to(tl.float32) * scale, mask)
