"""Products with quantised weights.

Few rows: weights are dequantised in registers. Programs share the inputs of an output, and a second
kernel adds their partial sums in a fixed order. More rows: weights are dequantised into memory for
the matrix product of torch, which takes less time than dequantising in every tile of rows.

Weights are dequantised in float32 and rounded once to the dtype of the activations, as
`PackedWeight.dequantized` does, except that for few rows scales of whole outputs are applied to the
float32 sums. The order of additions of a row depends on the weight, the device and on whether there
are few rows; among few rows it does not depend on the others. Layout of the weights: `gpu_weight`.

Shape letters: M rows, N outputs, K inputs, G groups of inputs, H inputs of a part in a chunk, S
shares of the inputs.
"""

# Upper-case arguments are compile-time constants of a kernel.
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve_kernels.gpu.attention.tile_sizes import num_multiprocessors
from splitserve_kernels.gpu.launch import ceil_div, next_power_of_2
from splitserve_kernels.gpu.quantized.gpu_weight import (
    OUTPUT_MULTIPLE,
    WORD_BITS,
    GpuPackedWeight,
    chunk_size,
    num_chunks,
)

# The largest number of rows whose weights are dequantised in registers.
MAX_NUM_FEW_ROWS = 128
_MIN_PART = 16
_MIN_ROWS_OF_TILE, _MAX_ROWS_OF_TILE = 16, 64
# Of the sizes measured on an H100, these are within 12 % of the best for up to 16 rows, and within
# 36 % for 64.
_MIN_INPUTS_OF_SHARE = 512
_PROGRAMS_PER_MULTIPROCESSOR = 6
_NUM_STAGES = 2
_NUM_WARPS = 4
_BLOCK = 256
# As integer in its lowest bits, this float32 has the sum of 2 ** 23 and the integer.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Sizes of a launch. `num_inputs`: inputs of a part per iteration, H or a half of it.

    `chunks_of_share`: chunks of the inputs for each program.
    """

    num_rows: int
    num_inputs: int
    num_stages: int
    num_shares: int
    chunks_of_share: int


def linear_tiles(
    weight: GpuPackedWeight, num_rows: int, dtype: torch.dtype, device: torch.device
) -> LinearTiles:
    """Returns the sizes for `num_rows` rows of `dtype` on `device`."""
    count = num_chunks(weight.num_inputs, weight.num_bits, weight.part_size)
    programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    shares = ceil_div(programs, weight.words.shape[1] // OUTPUT_MULTIPLE)
    least = ceil_div(_MIN_INPUTS_OF_SHARE, chunk_size(weight.num_bits, weight.part_size))
    chunks = max(least, ceil_div(count, shares))
    return LinearTiles(
        num_rows=min(_MAX_ROWS_OF_TILE, max(_MIN_ROWS_OF_TILE, next_power_of_2(num_rows))),
        num_inputs=_MIN_PART if dtype.itemsize > 2 else weight.part_size,
        # Loads from a table depend on loaded codes: the compiler would pipeline them for no gain.
        num_stages=_NUM_STAGES if weight.numbers.table is None else 1,
        num_shares=ceil_div(count, chunks),
        chunks_of_share=chunks,
    )


def quantized_linear(
    x: Tensor,
    weight: GpuPackedWeight,
    bias: Tensor | None = None,
    *,
    tiles: LinearTiles | None = None,
) -> Tensor:
    """Returns x @ weight.T + bias, [M, N] in the dtype of `x`.

    `x`: [M, K], the numbers of a row contiguous; bfloat16, float16 or float32. `bias`: [N] of any
    float dtype, contiguous. `tiles`: dequantises in registers with these sizes, however many rows
    there are. Adds in float32 and rounds once. Raises ValueError if the rows have another number
    of inputs.
    """
    num_rows, num_outputs = x.shape[0], weight.num_outputs
    if x.shape[1] != weight.num_inputs:
        raise ValueError(f"rows have {x.shape[1]} inputs; allowed: {weight.num_inputs}")
    if weight.input_order is not None:
        x = x[:, weight.input_order]
    if tiles is None and num_rows > MAX_NUM_FEW_ROWS:
        dense = dequantized(weight, x.dtype)[:, :num_outputs]
        return x @ dense if bias is None else torch.addmm(bias.to(x.dtype), x, dense)
    output = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return output
    tiles = tiles or linear_tiles(weight, num_rows, x.dtype, x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    is_shared = tiles.num_shares > 1
    shape = (tiles.num_shares, num_rows, num_outputs)
    sums = x.new_empty(shape, dtype=torch.float32) if is_shared else output
    finish = {"HAS_SCALES": weight.output_scales is not None, "HAS_BIAS": bias is not None}
    width = weight.words.shape[1]
    grid = (ceil_div(num_rows, tiles.num_rows), width // OUTPUT_MULTIPLE, tiles.num_shares)
    _linear_kernel[grid](
        x,
        weight.words,
        _first(weight.scales, x),
        _first(weight.zero_points, weight.offsets, x),
        _first(weight.numbers.table, x),
        _first(weight.output_scales, x),
        _first(bias, x),
        sums,
        num_rows,
        x.stride(0),
        weight.num_inputs,
        num_outputs,
        width,
        num_chunks(weight.num_inputs, weight.num_bits, weight.part_size),
        tiles.chunks_of_share,
        IS_SHARED=is_shared,
        BLOCK_M=tiles.num_rows,
        BLOCK_N=OUTPUT_MULTIPLE,
        BLOCK_K=tiles.num_inputs,
        num_warps=_NUM_WARPS,
        num_stages=tiles.num_stages,
        **finish,
        **_format(weight),
    )
    if is_shared:
        _sum_kernel[num_rows, ceil_div(num_outputs, _BLOCK)](
            sums,
            _first(weight.output_scales, x),
            _first(bias, x),
            output,
            num_rows,
            num_outputs,
            NUM_SHARES=tiles.num_shares,
            BLOCK=_BLOCK,
            num_warps=4,
            **finish,
        )
    return output


def dequantized(weight: GpuPackedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the weights, [K, N] of `dtype`, inputs in the order of the codes, N padded."""
    width = weight.words.shape[1]
    result = torch.empty(weight.num_inputs, width, dtype=dtype, device=weight.words.device)
    grid = (len(weight.words) // _MIN_PART, width // OUTPUT_MULTIPLE)
    _dequantize_kernel[grid](
        weight.words,
        _first(weight.scales, result),
        _first(weight.zero_points, weight.offsets, result),
        _first(weight.numbers.table, result),
        _first(weight.output_scales, result),
        result,
        weight.num_inputs,
        width,
        HAS_SCALES=weight.output_scales is not None,
        BLOCK_N=OUTPUT_MULTIPLE,
        BLOCK_K=_MIN_PART,
        num_warps=_NUM_WARPS,
        **_format(weight),
    )
    return result


def _format(weight: GpuPackedWeight) -> dict[str, int | bool]:
    """Returns the compile-time constants of `weight`."""
    return {
        "IS_EVEN": weight.num_inputs % chunk_size(weight.num_bits, weight.part_size) == 0,
        "BITS": weight.num_bits,
        "PARTS": WORD_BITS // weight.num_bits,
        "PART": weight.part_size,
        "GROUP": weight.group_size,
        "ZERO": weight.numbers.zero,
        "MANTISSA_BITS": weight.numbers.mantissa_bits,
        "EXPONENT_BITS": weight.numbers.exponent_bits,
        "HAS_TABLE": weight.numbers.table is not None,
        "HAS_ZERO_POINTS": weight.zero_points is not None,
        "HAS_OFFSETS": weight.offsets is not None,
    }


def _first(*tensors: Tensor | None) -> Tensor:
    """Returns the first tensor that is not None, as argument for an unused pointer."""
    return next(tensor for tensor in tensors if tensor is not None)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "chunks_of_share"])
def _linear_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    table: tl.tensor,
    output_scales: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    num_inputs: tl.tensor,
    num_outputs: tl.tensor,
    width: tl.tensor,
    num_chunks: tl.tensor,
    chunks_of_share: tl.tensor,
    IS_SHARED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiplies a tile of rows with some outputs, over one share of the inputs.

    Writes `sums`: [M, N] outputs, or [S, M, N] float32 partial sums if IS_SHARED. `width`: padded
    outputs in memory. Weights are the left operand: they go from memory to registers, as they are
    multiplied, and few rows waste little of a product.
    """
    lines = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    rows = x + lines.to(tl.int64) * row_stride
    # Reading a line twice would take as long as reading two.
    is_row = (lines < num_rows)[None, :]
    sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = share * chunks_of_share * (PART // BLOCK_K)
    last = tl.minimum((share + 1) * chunks_of_share, num_chunks) * (PART // BLOCK_K)
    for step in tl.range(first, last):
        line = (step * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64) * width
        word = tl.load(words + line[None, :] + outputs[:, None])
        begin = _first_input(step, PARTS, PART, BLOCK_K)
        for part in tl.static_range(PARTS):
            k = begin + part * PART + tl.arange(0, BLOCK_K)
            is_input = is_row if IS_EVEN else is_row & (k < num_inputs)[:, None]
            xs = tl.load(rows[None, :] + k[:, None], mask=is_input, other=0.0)
            if _begins_group(part, PARTS, PART, GROUP):
                place = _place_of_group(begin + part * PART, width, GROUP)
                scale, offset = _load_group(
                    scales + outputs + place,
                    offsets + outputs + place,
                    GROUP,
                    HAS_ZERO_POINTS,
                    HAS_OFFSETS,
                )
            code = (word >> (part * BITS)) & (2**BITS - 1)
            numbers = _numbers(code, table, BITS, ZERO, MANTISSA_BITS, EXPONENT_BITS, HAS_TABLE)
            weights = _scaled(numbers, scale, offset, GROUP, HAS_ZERO_POINTS, HAS_OFFSETS)
            sum = tl.dot(weights.to(xs.dtype), xs, sum, input_precision="ieee")
    is_output = (outputs < num_outputs)[:, None] & is_row
    place = lines.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    if IS_SHARED:
        place += share.to(tl.int64) * num_rows * num_outputs
    else:
        is_stored = outputs < num_outputs
        if HAS_SCALES:
            sum *= tl.load(output_scales + outputs)[:, None]
        if HAS_BIAS:
            sum += tl.load(bias + outputs, mask=is_stored, other=0.0).to(tl.float32)[:, None]
    tl.store(sums + place, sum.to(sums.dtype.element_ty), mask=is_output)


@triton.jit
def _dequantize_kernel(
    words: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    table: tl.tensor,
    output_scales: tl.tensor,
    result: tl.tensor,
    num_inputs: tl.tensor,
    width: tl.tensor,
    IS_EVEN: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Writes the weights of some words to `result` [K, N]; `width`: N, padded."""
    step = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = (step * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64) * width
    word = tl.load(words + line[None, :] + outputs[:, None])
    begin = _first_input(step, PARTS, PART, BLOCK_K)
    factor = tl.load(output_scales + outputs)[:, None] if HAS_SCALES else 1.0
    for part in tl.static_range(PARTS):
        if _begins_group(part, PARTS, PART, GROUP):
            place = outputs + _place_of_group(begin + part * PART, width, GROUP)
            scale, offset = _load_group(
                scales + place, offsets + place, GROUP, HAS_ZERO_POINTS, HAS_OFFSETS
            )
        code = (word >> (part * BITS)) & (2**BITS - 1)
        numbers = _numbers(code, table, BITS, ZERO, MANTISSA_BITS, EXPONENT_BITS, HAS_TABLE)
        weights = factor * _scaled(numbers, scale, offset, GROUP, HAS_ZERO_POINTS, HAS_OFFSETS)
        k = begin + part * PART + tl.arange(0, BLOCK_K)
        places = result + k.to(tl.int64)[None, :] * width + outputs[:, None]
        weights = weights.to(result.dtype.element_ty)
        if IS_EVEN:
            tl.store(places, weights)
        else:
            tl.store(places, weights, mask=(k < num_inputs)[None, :])


@triton.jit
def _first_input(
    step: tl.tensor, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Returns the first input of the first part of line `step` * BLOCK_K of the words."""
    steps: tl.constexpr = PART // BLOCK_K
    return step // steps * (PARTS * PART) + step % steps * BLOCK_K


@triton.constexpr_function
def _begins_group(part: int, num_parts: int, part_size: int, group_size: int) -> bool:
    """Returns whether scales must be loaded again: `part` may begin a new group of inputs."""
    chunk = num_parts * part_size
    is_aligned = group_size > 0 and (chunk % group_size == 0 or group_size % chunk == 0)
    return part == 0 or (group_size > 0 and (not is_aligned or part * part_size % group_size == 0))


@triton.jit
def _place_of_group(k: tl.tensor, width: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Returns the offset of the numbers of the groups that inputs `k` belong to."""
    group = k // GROUP if GROUP > 0 else k * 0
    return group.to(tl.int64) * width


@triton.jit
def _load_group(
    scales: tl.tensor,
    offsets: tl.tensor,
    GROUP: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
) -> tl.tensor:
    """Returns scales and offsets, or zero points, of groups; zeros for what is not used."""
    scale = tl.zeros(scales.shape, tl.float32)
    offset = scale
    if GROUP > 0:
        scale = tl.load(scales).to(tl.float32)
    if HAS_ZERO_POINTS or HAS_OFFSETS:
        offset = tl.load(offsets).to(tl.float32)
    return scale, offset


@triton.jit
def _scaled(
    numbers: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    GROUP: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
) -> tl.tensor:
    """Returns the weights of `numbers` [N, H], without the scales of whole outputs."""
    if HAS_ZERO_POINTS:
        numbers -= offset[:, None]
    if GROUP > 0:
        numbers *= scale[:, None]
    if HAS_OFFSETS:
        numbers -= offset[:, None]
    return numbers


@triton.jit
def _numbers(
    code: tl.tensor,
    table: tl.tensor,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
) -> tl.tensor:
    """Returns the float32 numbers that codes stand for; see `CodeNumbers`."""
    if HAS_TABLE:
        return tl.load(table + code)
    if EXPONENT_BITS > 0:
        # Bits of a float32 with another bias of the exponent, subnormal numbers included.
        sign = (code << (32 - BITS)) & -(2**31)
        bits = sign | ((code & (2 ** (BITS - 1) - 1)) << (23 - MANTISSA_BITS))
        return bits.to(tl.float32, bitcast=True) * (2.0 ** (128 - 2 ** (EXPONENT_BITS - 1)))
    # Conversions from integers are several times slower than this subtraction.
    return (code | _MAGIC_BITS).to(tl.float32, bitcast=True) - (_MAGIC + ZERO)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    sums: tl.tensor,
    output_scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds partial sums [S, M, N] of some outputs of one row, in the order of the shares."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_outputs
    place = row * num_outputs + outputs
    total = tl.load(sums + place, mask=is_output, other=0.0)
    for _ in tl.static_range(NUM_SHARES - 1):
        sums += num_rows.to(tl.int64) * num_outputs
        total += tl.load(sums + place, mask=is_output, other=0.0)
    if HAS_SCALES:
        total *= tl.load(output_scales + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=is_output)
