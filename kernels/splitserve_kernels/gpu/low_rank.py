"""Low-rank updates of adapters, added to the outputs of linear layers.

Tokens with an adapter are sorted by its slot and computed in tiles of one slot. One kernel
multiplies with the few ranks of each slot (`down`); programs share the inputs, in chunks whose size
depends on the layer alone. The other adds their partial sums in order, rounds them to the dtype,
multiplies with `up` and adds to the outputs. All parts of a fused layer take one launch of each. A
row's bits depend on its own numbers and adapter alone, and rows without an adapter are not touched.
Source: Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters", 2023.

Where matrices are, and how large, is read on the device: a recorded launch serves any adapters.

Shape letters: T tokens, I inputs, O outputs of all parts, N tiles, P parts, S splits of the inputs,
R most ranks of a part.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.adapter_tiles import (
    NUM_WORDS,
    RANK_MULTIPLE,
    TILE_SIZE,
    SlotLinear,
    TokenTiles,
)
from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2

_MAX_RANKS_OF_TILE = 64
_MAX_NUM_SPLITS = 16
_MIN_INPUTS_OF_SPLIT = 256
# Bytes of the inputs of an iteration, and of the outputs of a program, for each token.
_BYTES_OF_TILE = 256
_NUM_WARPS = 4
_MULTIPLE = tl.constexpr(RANK_MULTIPLE)
_NUM_STAGES = 3


def add_low_rank(
    x: Tensor, output: Tensor, tiles: TokenTiles, linear: SlotLinear, bias: Tensor | None = None
) -> None:
    """Adds the updates of the tokens in `tiles` to `output`, what a linear layer computed of `x`.

    `x`: [T, I], `output`: [T, O], in the same dtype, the numbers of a row contiguous. `bias`: [O]
    of the layer, contiguous, any float dtype; None for none. For each part of the outputs, with the
    update of the token's slot: output = gain * (output - bias) + bias + gain * (up (scale * down
    x)) + bias of the update. Adds in float32 and rounds twice, to the ranks and to the outputs.
    """
    num_places, num_tiles, num_inputs = len(tiles.order), tiles.tiles.shape[1], x.shape[1]
    if num_tiles == 0:
        return
    num_parts = len(linear.sizes)
    block_r = max(RANK_MULTIPLE, min(_MAX_RANKS_OF_TILE, next_power_of_2(linear.max_rank)))
    num_blocks_r = ceil_div(linear.max_rank, block_r)
    block = _BYTES_OF_TILE // x.dtype.itemsize
    # Of the layer alone, so that sums have the same order in every batch.
    inputs_of_split = max(_MIN_INPUTS_OF_SPLIT, ceil_div(num_inputs, _MAX_NUM_SPLITS))
    inputs_of_split = ceil_div(inputs_of_split, block) * block
    num_splits = ceil_div(num_inputs, inputs_of_split)
    width = num_parts * num_blocks_r * block_r
    sums = x.new_empty(num_splits, num_places, width, dtype=torch.float32)
    shared = {
        "MOST_RANKS": num_blocks_r * block_r,
        "NUM_PARTS": num_parts,
        "NUM_WORDS": NUM_WORDS,
        "TILE": TILE_SIZE,
        "BLOCK_R": block_r,
        "num_warps": _NUM_WARPS,
    }
    _shrink_kernel[num_tiles, num_splits, num_parts * num_blocks_r](
        x,
        tiles.order,
        tiles.tiles,
        linear.words,
        sums,
        num_tiles,
        num_places,
        x.stride(0),
        linear.words.stride(0),
        INPUTS=num_inputs,
        INPUTS_OF_SPLIT=inputs_of_split,
        BLOCK_K=block,
        num_stages=_NUM_STAGES,
        **shared,
    )
    _expand_kernel[num_tiles, ceil_div(max(linear.sizes), block), num_parts](
        output,
        tiles.order,
        tiles.tiles,
        linear.words,
        sums,
        output if bias is None else bias,
        num_tiles,
        num_places,
        output.stride(0),
        linear.words.stride(0),
        NUM_SPLITS=num_splits,
        HAS_BIAS=bias is not None,
        SIZE_0=linear.sizes[0],
        SIZE_1=linear.sizes[1] if num_parts > 1 else 0,
        SIZE_2=linear.sizes[2] if num_parts > 2 else 0,
        BLOCK_N=block,
        num_stages=1,
        **shared,
    )


@triton.jit(do_not_specialize=["num_tiles", "num_places"])
def _shrink_kernel(
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    words: tl.tensor,
    sums: tl.tensor,
    num_tiles: tl.tensor,
    num_places: tl.tensor,
    row_stride: tl.tensor,
    slot_stride: tl.tensor,
    INPUTS: tl.constexpr,
    INPUTS_OF_SPLIT: tl.constexpr,
    MOST_RANKS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiplies a tile of tokens with some ranks of a part, over one split of the inputs.

    Writes `sums`, [S, places, P * R] float32.
    """
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + 2 * num_tiles + tile)
    if count == 0:
        return
    part = block // (MOST_RANKS // BLOCK_R)
    ranks = block % (MOST_RANKS // BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = words + tl.load(tiles + tile) * slot_stride + part * NUM_WORDS
    rank = tl.load(word + 4).to(tl.int32)
    if block % (MOST_RANKS // BLOCK_R) * BLOCK_R >= rank:
        return
    lines = tl.arange(0, TILE)
    places = tl.load(tiles + num_tiles + tile) + lines
    is_line = lines < count
    rows = x + tl.load(order + places, mask=is_line, other=0).to(tl.int64) * row_stride
    matrix = tl.multiple_of(tl.load(word).to(tl.pointer_type(x.dtype.element_ty)), 16)
    down = matrix + ranks.to(tl.int64) * INPUTS
    is_rank = ranks < rank
    first = split * INPUTS_OF_SPLIT
    sum = tl.zeros([TILE, BLOCK_R], tl.float32)
    for begin in tl.range(first, tl.minimum(first + INPUTS_OF_SPLIT, INPUTS), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        is_input = k < INPUTS
        xs = tl.load(
            rows[:, None] + k[None, :], mask=is_line[:, None] & is_input[None, :], other=0.0
        )
        weights = tl.load(
            down[None, :] + k[:, None], mask=is_rank[None, :] & is_input[:, None], other=0.0
        )
        sum = tl.dot(xs, weights, sum, input_precision="ieee")
    line = (split.to(tl.int64) * num_places + places) * (NUM_PARTS * MOST_RANKS)
    target = sums + line[:, None] + (part * MOST_RANKS + ranks)[None, :]
    # Zeros after the last rank, so that whole tiles of ranks can be read.
    tl.store(target, sum, mask=is_line[:, None] & (ranks < _padded(rank))[None, :])


@triton.jit
def _padded(rank: tl.tensor) -> tl.tensor:
    """Returns the rank rounded up to whole columns of `up`."""
    return (rank + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE


@triton.jit(do_not_specialize=["num_tiles", "num_places"])
def _expand_kernel(
    output: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    words: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    num_tiles: tl.tensor,
    num_places: tl.tensor,
    row_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    MOST_RANKS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Changes some outputs of a part in place, for a tile of tokens."""
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + 2 * num_tiles + tile)
    if count == 0:
        return
    word = words + tl.load(tiles + tile) * slot_stride + part * NUM_WORDS
    rank = tl.load(word + 4).to(tl.int32)
    size = tl.where(part == 0, SIZE_0, tl.where(part == 1, SIZE_1, SIZE_2))
    if (rank == 0) | (block * BLOCK_N >= size):
        return
    lines = tl.arange(0, TILE)
    places = tl.load(tiles + num_tiles + tile) + lines
    is_line = lines < count
    outputs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < size
    numbers = output.dtype.element_ty
    columns = _padded(rank)
    up = tl.multiple_of(tl.load(word + 1).to(tl.pointer_type(numbers)), 16)
    scale = tl.load(word + 5).to(tl.int32).to(tl.float32, bitcast=True)
    lines_of_sums = places.to(tl.int64) * (NUM_PARTS * MOST_RANKS) + part * MOST_RANKS
    added = tl.zeros([TILE, BLOCK_N], tl.float32)
    for first in tl.range(0, columns, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        is_sum = is_line[:, None] & (ranks < columns)[None, :]
        partial = sums + lines_of_sums[:, None] + ranks[None, :]
        reduced = tl.zeros([TILE, BLOCK_R], tl.float32)
        for _ in tl.static_range(NUM_SPLITS):
            reduced += tl.load(partial, mask=is_sum, other=0.0)
            partial += num_places.to(tl.int64) * (NUM_PARTS * MOST_RANKS)
        weights = tl.load(
            up + outputs.to(tl.int64)[None, :] * columns + ranks[:, None],
            mask=is_output[None, :] & (ranks < columns)[:, None],
            other=0.0,
        )
        added = tl.dot((reduced * scale).to(numbers), weights, added, input_precision="ieee")
    outputs_of_all = tl.where(part == 0, 0, tl.where(part == 1, SIZE_0, SIZE_0 + SIZE_1)) + outputs
    tokens = tl.load(order + places, mask=is_line, other=0).to(tl.int64)
    target = output + tokens[:, None] * row_stride + outputs_of_all[None, :]
    is_stored = is_line[:, None] & is_output[None, :]
    changed = tl.load(target, mask=is_stored, other=0.0).to(tl.float32)
    gain = tl.load(word + 2)
    if gain != 0:
        factor = tl.load(gain.to(tl.pointer_type(tl.float32)) + outputs, mask=is_output, other=1.0)[
            None, :
        ]
        product = changed
        if HAS_BIAS:
            own = tl.load(bias + outputs_of_all, mask=is_output, other=0.0)
            product -= own.to(tl.float32)[None, :]
        changed += (factor - 1.0) * product
        added *= factor
    changed += added
    added_bias = tl.load(word + 3)
    if added_bias != 0:
        biases = added_bias.to(tl.pointer_type(tl.float32)) + outputs
        changed += tl.load(biases, mask=is_output, other=0.0)[None, :]
    tl.store(target, changed.to(numbers), mask=is_stored)
