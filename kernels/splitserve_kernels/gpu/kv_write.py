"""Writes to the slots of a paged cache: new keys and values, rotated ones, and copies of blocks.

`rotary_kv_write` fuses the rotary position embedding of queries and keys with `kv_write`. The two
numbers that are rotated together are half the rotated dimensions apart, as in Hugging Face's Llama.
Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, sections 4 and 4.3 (copy-on-write); Su et al., "RoFormer: Enhanced
transformer with rotary position embedding", 2021.

Shape letters: T tokens over all rows, h heads of a tile, H query heads, G key/value heads, D size
of a query or key head, E size of a value head, R rotated dimensions, the first ones of D, N blocks
of a pool, W numbers of a block, P copied blocks.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.launch import (
    FLOAT8_MAX,
    LayerPools,
    RotaryTables,
    ceil_div,
    next_power_of_2,
)

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
def place_of_slot(
    pool: tl.tensor,
    slot: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Returns the pointer to the first head of a slot. `slot`: int64."""
    first_head = (slot % BLOCK_SIZE) * NUM_HEADS
    return pool + slot // BLOCK_SIZE * block_stride + first_head * HEAD_DIM


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
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    store_rounded(destination + offsets, numbers.to(tl.float32) * scale, mask)


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
    copy_heads(
        key + token * key_token_stride,
        key_head_stride,
        place_of_slot(key_pool, slot, key_block_stride, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM),
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
        place_of_slot(value_pool, slot, value_block_stride, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM),
        heads,
        value_scale,
        NUM_KV_HEADS,
        VALUE_DIM,
        0,
        BLOCK_E,
    )


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
    source_pointers = source + heads[:, None] * source_head_stride + dims[None, :]
    x = tl.load(source_pointers, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source_pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    pointers = destination + heads[:, None] * HEAD_DIM + dims[None, :]
    store_rounded(pointers, (x * cos - y * sin) * scale, mask)
    store_rounded(pointers + HALF, (y * cos + x * sin) * scale, mask)
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
        _turn_heads(
            key + token * key_token_stride,
            key_head_stride,
            place_of_slot(key_pool, slot, key_block_stride, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM),
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
            place_of_slot(
                value_pool, slot, value_block_stride, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM
            ),
            heads,
            value_scale,
            NUM_KV_HEADS,
            VALUE_DIM,
            0,
            BLOCK_E,
        )


_COPY_TILE_SIZE = 4096


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies the blocks `sources` [P] of `pool` [N, W] to the blocks `destinations` [P], integers.

    The last stride of `pool` is 1. A source may have several destinations. No block may be both
    source and destination, and none may be a destination twice: so the order of copies does not
    matter, and all reads come before all writes.
    """
    num_blocks, block_elements = sources.shape[0], pool.shape[1]
    if num_blocks * block_elements == 0:
        return
    num_tiles = ceil_div(block_elements, _COPY_TILE_SIZE)
    _copy_kernel[(num_blocks * num_tiles,)](
        pool,
        sources,
        destinations,
        block_elements,
        num_tiles,
        pool.stride(0),
        TILE_SIZE=_COPY_TILE_SIZE,
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
