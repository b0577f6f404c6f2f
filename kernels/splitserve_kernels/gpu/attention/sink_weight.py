"""Attention sinks for an attention operator without them: rescales its outputs.

A sink is one more score in a head's softmax, without a value. So the output with a sink equals the
output without it times S / (S + exp(sink)), exactly, where S is the sum of exp(score) over keys.

Shape letters: T tokens over all rows, H query heads, E size of a value head.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.head_tiles import heads_per_tile
from splitserve_kernels.gpu.integers import ceil_div, next_power_of_2


def weigh_with_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Rescales `output` [T, H, E], contiguous, in place.

    `log_sums`: [H, T] float32, the natural logarithm of S. `sinks`: [H].
    """
    num_tokens, num_heads, value_dim = output.shape
    if num_tokens == 0:
        return
    block_h = heads_per_tile(num_heads, value_dim)
    _sink_kernel[(num_tokens, ceil_div(num_heads, block_h))](
        output,
        log_sums,
        sinks,
        log_sums.stride(0),
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_H=block_h,
        BLOCK_E=next_power_of_2(value_dim),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["head_stride"])
def _sink_kernel(
    output: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Rescales some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < NUM_HEADS
    log_sum = tl.load(log_sums + heads * head_stride + token, mask=is_head, other=0.0)
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
    weight = 1.0 / (1.0 + tl.exp(sink - log_sum))
    dims = tl.arange(0, BLOCK_E)
    places = (token * NUM_HEADS + heads)[:, None] * VALUE_DIM + dims[None, :]
    mask = is_head[:, None] & (dims < VALUE_DIM)[None, :]
    numbers = tl.load(output + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + places, (numbers * weight[:, None]).to(output.dtype.element_ty), mask=mask)
