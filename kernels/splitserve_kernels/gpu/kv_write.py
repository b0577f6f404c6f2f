"""Scatter of new keys and values into the slots of a paged cache.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.

Shape letters: T tokens over all rows, G key/value heads, D size of a key head, E size of a value
head.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.head_tiles import copy_heads, heads_per_tile, with_dense_heads
from splitserve_kernels.gpu.integers import ceil_div, next_power_of_2
from splitserve_kernels.gpu.layer_pools import LayerPools


def kv_write(key: Tensor, value: Tensor, pools: LayerPools, slot_mapping: Tensor) -> None:
    """Writes `key` [T, G, D] and `value` [T, G, E] into their slots, in the dtype of the pools.

    Stores number / scale, clamped to the range of float8 for a float8 pool. `slot_mapping`: [T]
    int64; a token with a negative slot is not written.
    """
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key, value = with_dense_heads(key), with_dense_heads(value)
    value_dim = value.shape[2]
    block_h = heads_per_tile(num_heads, max(head_dim, value_dim))
    _write_kernel[(num_tokens, ceil_div(num_heads, block_h))](
        key,
        value,
        pools.key,
        pools.value,
        slot_mapping,
        1.0 / pools.scales.key,
        1.0 / pools.scales.value,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pools.key.stride(0),
        pools.value.stride(0),
        BLOCK_SIZE=pools.block_size,
        NUM_KV_HEADS=num_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_H=block_h,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_E=next_power_of_2(value_dim),
        num_warps=4,
    )


@triton.jit
def _write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    slot_mapping: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Writes some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    block = slot // BLOCK_SIZE
    first_head = (slot % BLOCK_SIZE) * NUM_KV_HEADS
    copy_heads(
        key + token * key_token_stride,
        key_head_stride,
        key_pool + block * key_block_stride + first_head * HEAD_DIM,
        heads,
        key_scale,
        NUM_KV_HEADS,
        HEAD_DIM,
        0,
        BLOCK_D,
    )
    copy_heads(
        value + token * value_token_stride,
        value_head_stride,
        value_pool + block * value_block_stride + first_head * VALUE_DIM,
        heads,
        value_scale,
        NUM_KV_HEADS,
        VALUE_DIM,
        0,
        BLOCK_E,
    )
