"""Rotary position embedding of queries and keys, fused with `kv_write`.

Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021. The two
numbers that are rotated together are half the rotated dimensions apart, as in Hugging Face's Llama.

Shape letters: T tokens over all rows, H query heads, G key/value heads, D size of a query or key
head, E size of a value head, R rotated dimensions, the first ones of D.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.head_tiles import (
    copy_heads,
    heads_per_tile,
    store_rounded,
    with_dense_heads,
)
from splitserve_kernels.gpu.integers import ceil_div, next_power_of_2
from splitserve_kernels.gpu.layer_pools import LayerPools


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Rotation of each token's position: `cosine`, `sine`, [T, R / 2] float32, contiguous."""

    cosine: Tensor
    sine: Tensor


def rotary_kv_write(
    heads: tuple[Tensor, Tensor, Tensor],
    rotary: RotaryTables,
    pools: LayerPools,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotates query and key, writes key and value as `kv_write` does; returns the rotated query.

    `heads`: query [T, H, D], key [T, G, D] and value [T, G, E], not changed. `slot_mapping`: [T]
    int64. Returns [T, H, D] in the dtype of the query. All arithmetic is float32; each written or
    returned number is rounded once.
    """
    query, key, value = (with_dense_heads(tensor) for tensor in heads)
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(query.shape)
    if num_tokens == 0:
        return output
    num_kv_heads, value_dim = value.shape[1:]
    half = rotary.cosine.shape[1]
    rest = max(1, head_dim - 2 * half)
    block_h = heads_per_tile(num_heads, max(head_dim, value_dim))
    num_query_tiles = ceil_div(num_heads, block_h)
    num_kv_tiles = ceil_div(num_kv_heads, block_h)
    _rotary_write_kernel[(num_tokens, num_query_tiles + num_kv_tiles)](
        query,
        key,
        value,
        rotary.cosine,
        rotary.sine,
        output,
        pools.key,
        pools.value,
        slot_mapping,
        1.0 / pools.scales.key,
        1.0 / pools.scales.value,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pools.key.stride(0),
        pools.value.stride(0),
        BLOCK_SIZE=pools.block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HALF=half,
        NUM_QUERY_TILES=num_query_tiles,
        BLOCK_H=block_h,
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(rest),
        BLOCK_E=next_power_of_2(value_dim),
        num_warps=4,
    )
    return output


@triton.jit
def _turn_heads(
    source: tl.tensor,
    source_head_stride: tl.tensor,
    destination: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Copies `heads` with their first 2 HALF dimensions rotated, times `scale`."""
    dims = tl.arange(0, BLOCK_HALF)
    is_dim = dims < HALF
    cos = tl.load(cosine + dims, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(sine + dims, mask=is_dim, other=0.0)[None, :]
    mask = (heads < NUM_HEADS)[:, None] & is_dim[None, :]
    source_places = source + heads[:, None] * source_head_stride + dims[None, :]
    x = tl.load(source_places, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source_places + HALF, mask=mask, other=0.0).to(tl.float32)
    places = destination + heads[:, None] * HEAD_DIM + dims[None, :]
    store_rounded(places, (x * cos - y * sin) * scale, mask)
    store_rounded(places + HALF, (y * cos + x * sin) * scale, mask)
    if 2 * HALF < HEAD_DIM:
        copy_heads(
            source,
            source_head_stride,
            destination,
            heads,
            scale,
            NUM_HEADS,
            HEAD_DIM,
            2 * HALF,
            BLOCK_REST,
        )


@triton.jit
def _rotary_write_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    output: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    slot_mapping: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_QUERY_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Processes some query heads, or some key/value heads, of one token."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cosine += token * HALF
    sine += token * HALF
    if tile < NUM_QUERY_TILES:
        _turn_heads(
            query + token * query_token_stride,
            query_head_stride,
            output + token * (NUM_HEADS * HEAD_DIM),
            tile * BLOCK_H + tl.arange(0, BLOCK_H),
            1.0,
            cosine,
            sine,
            NUM_HEADS,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot < 0:
            return
        heads = (tile - NUM_QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        block = slot // BLOCK_SIZE
        first_head = (slot % BLOCK_SIZE) * NUM_KV_HEADS
        _turn_heads(
            key + token * key_token_stride,
            key_head_stride,
            key_pool + block * key_block_stride + first_head * HEAD_DIM,
            heads,
            key_scale,
            cosine,
            sine,
            NUM_KV_HEADS,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
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
