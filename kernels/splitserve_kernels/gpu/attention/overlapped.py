"""A tile of queries attends to keys, on Hopper: products run during the softmax of another tile.

Tensor cores work by themselves there. In `tiles.attend_to_keys` they wait for each softmax. Here
the product with the values of one tile is begun before the softmax of the next tile, and waited
for after it; the product of that tile's queries and keys has been begun before. Source: Shah et
al., "FlashAttention-3", 2024, section 3.2.

Shape letters: M queries of a tile, D size of a query or key head, E size of a value head.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from splitserve_kernels.gpu.attention.tiles import weigh_scores


@triton.jit
def attend_overlapped(
    query: tl.tensor,
    attended: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    query_positions: tl.tensor,
    first: tl.tensor,
    seam: tl.tensor,
    last_seam: tl.tensor,
    end: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    score_scale: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Attends to the keys at positions `first` .. `end` - 1, as `attend_to_keys` does in parts.

    Between the seams every query sees every key; they are whole tiles after `first`. Arguments and
    results are those of `attend_to_keys`.
    """
    key_mask = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    keys += tl.arange(0, BLOCK_D)[None, :]
    value_mask = (tl.arange(0, BLOCK_E) < VALUE_DIM)[None, :]
    values += tl.arange(0, BLOCK_E)[None, :]
    lanes = tl.arange(0, BLOCK_N)

    positions = first + lanes
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0).to(tl.int64)
    slots = (positions % BLOCK_SIZE) * NUM_KV_HEADS
    key_offsets = blocks * key_block_stride + slots * HEAD_DIM
    key = tl.load(keys + key_offsets[:, None], mask=key_mask, other=0.0)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
    # Block ids are loaded another tile ahead: see `attend_to_keys`.
    ahead = positions + BLOCK_N
    next_blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        part_first = first if part == 0 else (seam if part == 1 else last_seam)
        part_end = seam if part == 0 else (last_seam if part == 1 else end)
        for start in range(part_first, part_end, BLOCK_N):
            positions = start + lanes
            is_key = positions < end
            weights, correction, total, largest = weigh_scores(
                scores,
                total,
                largest,
                query_positions,
                positions,
                is_key,
                score_scale,
                part != 1,
                WINDOW,
                SOFTCAP,
            )
            value_offsets = blocks * value_block_stride + slots * VALUE_DIM
            is_value = value_mask & is_key[:, None] if part != 1 else value_mask
            value = tl.load(values + value_offsets[:, None], mask=is_value, other=0.0)

            # Keys of the next tile. Beyond the end they are any numbers, of scores that are hidden.
            positions += BLOCK_N
            blocks = next_blocks.to(tl.int64)
            slots = (positions % BLOCK_SIZE) * NUM_KV_HEADS
            ahead = positions + BLOCK_N
            next_blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            key_offsets = blocks * key_block_stride + slots * HEAD_DIM
            key = tl.load(keys + key_offsets[:, None], mask=key_mask, other=0.0)
            scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
            attended = attended * correction[:, None]
            attended = tl.dot(
                weights.to(query.dtype), value.to(query.dtype), attended, input_precision="ieee"
            )
    return attended, total, largest
