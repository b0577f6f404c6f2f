"""Quantised weights in the memory layout of the Triton kernels.

Codes of 1 to 4 bits take 4 bits, those of 5 to 8 bits take 8. A word of 32 bits holds P codes of
one output, of inputs that are H apart; the same word of neighbouring outputs is next to it in
memory. So a program loads whole lines of memory, and the P parts of the loaded words are operands
of matrix products with contiguous inputs.

Shape letters: N outputs, K inputs, G groups of inputs, P parts of a word (8 or 4), H inputs of a
part in a chunk (16 or 32), C chunks of P * H inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitserve_kernels.gpu.launch import ceil_div
from splitserve_kernels.packed_weight import NotPackable, PackedWeight

# Outputs are padded to a multiple of this, so that no load of weights needs a mask.
OUTPUT_MULTIPLE = 64
# The smallest inner dimension of a product.
_MIN_PART = 16
_PART = 32
WORD_BITS = 32
# Codes that are unpacked at a time; bounds temporary memory.
_CHUNK_CODES = 2**24


class CodeNumbers(NamedTuple):
    """Numbers that codes stand for: code - `zero`, a small float, or entries of a table.

    `mantissa_bits`, `exponent_bits`: of a float with a sign; 0 for other codes. `flipped_bits`:
    inverted at packing. `table`: [2 ** bits] float32 or None.
    """

    zero: int = 0
    mantissa_bits: int = 0
    exponent_bits: int = 0
    flipped_bits: int = 0
    table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GpuPackedWeight:
    """Weights [N, K] in device memory.

    `words`: [C * H, N] int32. `scales`: [G, N] float, of groups of `group_size` inputs; None, and a
    `group_size` of 0, if groups are whole outputs. `output_scales`: [N] float32, a factor of each
    output, or None. `zero_points`: [G, N] codes, or None. `offsets`: [G, N] float32, or None; at
    most one of the two is set. `input_order`: [K] int64, see `PackedWeight`. N and K are padded,
    except in `num_outputs` and `num_inputs`.
    """

    words: Tensor
    scales: Tensor | None
    output_scales: Tensor | None
    zero_points: Tensor | None
    offsets: Tensor | None
    numbers: CodeNumbers
    input_order: Tensor | None
    num_outputs: int
    num_inputs: int
    num_bits: int
    part_size: int
    group_size: int

    @property
    def num_bytes(self) -> int:
        """Total bytes of codes, scales and offsets."""
        tensors = (
            self.words,
            self.scales,
            self.output_scales,
            self.zero_points,
            self.offsets,
            self.numbers.table,
            self.input_order,
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that select the compiled kernel, except the shape."""
        numbers = self.numbers
        return (
            self.num_bits,
            self.part_size,
            self.group_size,
            numbers._replace(table=None),
            numbers.table is None,
            self.num_inputs % chunk_size(self.num_bits, self.part_size) == 0,
            None if self.scales is None else self.scales.dtype,
            self.output_scales is None,
            None if self.zero_points is None else self.zero_points.dtype,
            self.offsets is None,
            self.input_order is None,
        )

    @classmethod
    def pack(cls, weight: PackedWeight, device: torch.device) -> GpuPackedWeight:
        """Copies `weight` to `device` in the layout of the kernels.

        Raises NotPackable for groups that are no multiple of 16 inputs, for codes of more than 8
        bits, and for codes that stand for no finite number.
        """
        num_outputs, num_inputs = weight.shape
        if weight.num_bits > 8:
            raise NotPackable(f"codes have {weight.num_bits} bits; allowed: at most 8")
        num_bits = 4 if weight.num_bits <= 4 else 8
        is_of_output = weight.group_size >= num_inputs and weight.offsets is None
        group_size = 0 if is_of_output else weight.group_size
        if not is_of_output and group_size >= num_inputs:
            group_size = _PART
        if group_size % _MIN_PART:
            raise NotPackable(
                f"groups have {group_size} inputs; allowed: multiples of {_MIN_PART}, or all inputs"
            )
        part_size = _MIN_PART if group_size % _PART else _PART
        numbers = _numbers_of(weight, num_bits, device)
        num_padded = num_chunks(num_inputs, num_bits, part_size) * chunk_size(num_bits, part_size)
        groups = _Groups(weight, 1 if is_of_output else ceil_div(num_padded, group_size), device)
        shared = 1.0
        if not is_of_output and weight.scales.super_scales is None:
            # Kept apart, since scales may have fewer bits without it.
            shared = weight.scales.shared_scale
        return cls(
            words=_words(weight, num_bits, part_size, numbers, device),
            scales=None if is_of_output else groups.laid_out(_scales(weight, shared)),
            output_scales=_output_scales(weight, groups, shared, is_of_output=is_of_output),
            zero_points=None
            if weight.zero_points is None
            else groups.laid_out(_smallest(weight.zero_points)),
            offsets=None
            if weight.offsets is None
            else groups.laid_out(weight.offsets.as_float32(slice(None)) / shared),
            numbers=numbers,
            input_order=None if weight.input_order is None else weight.input_order.to(device),
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            num_bits=num_bits,
            part_size=part_size,
            group_size=group_size,
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """Memory layout of one number for each group of inputs of `weight`.

    `num_groups`: groups of the padded inputs.
    """

    weight: PackedWeight
    num_groups: int
    device: torch.device

    def laid_out(self, numbers: Tensor) -> Tensor:
        """Returns `numbers` [N / rows_per_group, G] as [G, N] on the device, padded with 0."""
        num_outputs = self.weight.shape[0]
        spread = numbers.to(self.device).T.repeat_interleave(self.weight.rows_per_group, dim=1)
        padded = ceil_div(num_outputs, OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
        result = spread.new_zeros(self.num_groups, padded)
        # A single group may be divided into several with the same number.
        rows = self.num_groups if len(spread) == 1 else len(spread)
        result[:rows, :num_outputs] = spread[:, :num_outputs]
        return result


def joined(weights: Sequence[GpuPackedWeight]) -> GpuPackedWeight | None:
    """Returns weights with the same inputs as one, outputs one after the other.

    Returns None if one product cannot take them: they are of different kinds, have an order of
    inputs, or padding lies between them.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if (
        any((each.kind, each.num_inputs) != (first.kind, first.num_inputs) for each in weights)
        or first.input_order is not None
        or any(each.num_outputs % OUTPUT_MULTIPLE for each in weights[:-1])
        or not all(_have_equal_tables(first, each) for each in weights)
    ):
        return None

    def side_by_side(tensors: Iterable[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim=-1) if present else None

    return replace(
        first,
        words=torch.cat([each.words for each in weights], dim=1),
        scales=side_by_side(each.scales for each in weights),
        output_scales=side_by_side(each.output_scales for each in weights),
        zero_points=side_by_side(each.zero_points for each in weights),
        offsets=side_by_side(each.offsets for each in weights),
        num_outputs=sum(each.num_outputs for each in weights),
    )


def _have_equal_tables(one: GpuPackedWeight, other: GpuPackedWeight) -> bool:
    table, other_table = one.numbers.table, other.numbers.table
    return table is None or (other_table is not None and torch.equal(table, other_table))


def _scales(weight: PackedWeight, shared: float) -> Tensor:
    """Returns the scales of groups, divided by `shared`, in the smallest dtype that is exact."""
    scales = weight.scales
    if shared != 1.0:
        scales = replace(scales, shared_scale=1.0)
    return _smallest_float(scales.as_float32(slice(None)))


def _output_scales(
    weight: PackedWeight, groups: _Groups, shared: float, *, is_of_output: bool
) -> Tensor | None:
    """Returns a factor of each output [N] float32; None for 1."""
    if is_of_output:
        return groups.laid_out(weight.scales.as_float32(slice(None)))[0]
    if shared == 1.0:
        return None
    return groups.laid_out(torch.full((1, 1), shared).expand(len(weight.scales.numbers), 1))[0]


def _smallest_float(numbers: Tensor) -> Tensor:
    """Returns float32 `numbers` in 16 bits if these hold them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        rounded = numbers.to(dtype)
        if torch.equal(rounded.float(), numbers):
            return rounded
    return numbers


def _smallest(zero_points: Tensor) -> Tensor:
    """Returns zero points in 8 bits if these hold them, otherwise in float32."""
    as_bytes = zero_points.to(torch.uint8)
    return as_bytes if torch.equal(as_bytes.float(), zero_points.float()) else zero_points.float()


# -- Numbers of codes ------------------------------------------------------------------------------

# Mantissa and exponent bits of floats without infinity, by the bits of a code.
_FLOATS = {4: ((1, 2),), 8: ((3, 4), (2, 5))}


def float_values(num_bits: int, mantissa_bits: int, exponent_bits: int) -> Tensor:
    """Returns the number of each code of a small float, [2 ** num_bits] float32, all finite."""
    codes = torch.arange(2**num_bits, dtype=torch.int32)
    magnitude = codes & (2 ** (num_bits - 1) - 1)
    # Bits of a float32 with another bias of the exponent, subnormal numbers included.
    bits = magnitude << (23 - mantissa_bits)
    numbers = bits.view(torch.float32).double() * 2.0 ** (128 - 2 ** (exponent_bits - 1))
    return torch.where(codes == magnitude, numbers, -numbers).float()


def _numbers_of(weight: PackedWeight, num_bits: int, device: torch.device) -> CodeNumbers:
    if weight.values is None:
        return CodeNumbers()
    values = weight.values.float().cpu()
    codes = torch.arange(len(values), dtype=torch.float32)
    half = len(values) // 2
    if torch.equal(values, codes + values[0]) and values[0] == values[0].round():
        return CodeNumbers(zero=-int(values[0]))
    if torch.equal(values, torch.where(codes < half, codes, codes - len(values))):
        return CodeNumbers(zero=half, flipped_bits=half)
    if weight.num_bits == num_bits:
        for mantissa_bits, exponent_bits in _FLOATS[num_bits]:
            expected = float_values(num_bits, mantissa_bits, exponent_bits)
            if torch.equal(torch.where(values.isfinite(), values, expected), expected):
                return CodeNumbers(mantissa_bits=mantissa_bits, exponent_bits=exponent_bits)
    return CodeNumbers(
        table=torch.nn.functional.pad(values, (0, 2**num_bits - half * 2)).to(device)
    )


# -- Words of codes --------------------------------------------------------------------------------


def chunk_size(num_bits: int, part_size: int) -> int:
    """Returns the inputs of a chunk, P * H."""
    return WORD_BITS // num_bits * part_size


def num_chunks(num_inputs: int, num_bits: int, part_size: int) -> int:
    """Returns C, the chunks that hold `num_inputs`."""
    return ceil_div(num_inputs, chunk_size(num_bits, part_size))


def _words(
    weight: PackedWeight,
    num_bits: int,
    part_size: int,
    numbers: CodeNumbers,
    device: torch.device,
) -> Tensor:
    """Returns the codes as words [C * H, N] int32 on the device."""
    num_outputs, num_inputs = weight.shape
    num_parts = WORD_BITS // num_bits
    count = num_chunks(num_inputs, num_bits, part_size)
    padded = ceil_div(num_outputs, OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
    words = torch.zeros(count * part_size, padded, dtype=torch.int32, device=device)
    rows = max(1, _CHUNK_CODES // num_inputs)
    for start in range(0, num_outputs, rows):
        part = slice(start, min(start + rows, num_outputs))
        codes = _codes(weight, part, device)
        if numbers.exponent_bits:
            _check_finite(weight, codes)
        codes = torch.nn.functional.pad(
            (codes ^ numbers.flipped_bits).int(),
            (0, count * num_parts * part_size - num_inputs),
        ).view(len(codes), count, num_parts, part_size)
        packed = codes[:, :, 0].clone()
        for index in range(1, num_parts):
            packed |= codes[:, :, index] << (index * num_bits)
        words[:, part] = packed.flatten(1).T
    return words


def _codes(weight: PackedWeight, rows: slice, device: torch.device) -> Tensor:
    """Returns the codes of `rows`, [rows, K] uint8 on the device."""
    codes, shift = torch.zeros((), dtype=torch.uint8, device=device), 0
    for plane in weight.planes:
        codes = codes | plane.unpacked(rows).to(device) << shift
        shift += plane.num_bits
    return codes


def _check_finite(weight: PackedWeight, codes: Tensor) -> None:
    """Raises NotPackable if a code stands for infinity or NaN: the kernels take all for numbers."""
    assert weight.values is not None
    is_bad = ~weight.values.isfinite()
    if bool(is_bad.any()) and bool(is_bad.to(codes.device)[codes.int()].any()):
        raise NotPackable("a weight is not finite; allowed: finite weights")
