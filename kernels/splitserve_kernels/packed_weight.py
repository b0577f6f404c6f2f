"""Quantised weights of a linear layer, in one form for all checkpoint formats.

    weight[n, k] = values[code[n, k]] * scale[n, g] - offset[n, g]

with the group g of input k. Shape letters: N outputs, K inputs, G groups of inputs, S groups that
share one super-scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Numbers that `dequantized` computes at once; bounds its temporary memory.
_CHUNK_ELEMENTS = 2**18


class NotPackable(ValueError):
    """Reports weights that kernels do not take; the message says why."""


@dataclass(frozen=True, slots=True)
class CodePlane:
    """Bit plane of a matrix of codes.

    `bits`: [N, K * num_bits / 8] uint8; input k is in byte k * num_bits // 8, and of the inputs in
    a byte the first has the lowest bits. `num_bits`: 1, 2, 4 or 8. `has_bytes`: each input has a
    byte of its own, [N, K]; `num_bits` then is any number up to 8.
    """

    bits: Tensor
    num_bits: int
    has_bytes: bool = False

    @property
    def num_inputs(self) -> int:
        """Inputs K."""
        width = self.bits.shape[1]
        return width if self.has_bytes else width * 8 // self.num_bits

    def on(self, device: torch.device) -> CodePlane:
        """Returns the bits on `device`."""
        return replace(self, bits=self.bits.to(device))

    def of_rows(self, rows: slice) -> CodePlane:
        """Returns the bits of some outputs."""
        return replace(self, bits=self.bits[rows])

    def unpacked(self, rows: slice) -> Tensor:
        """Returns the values of this plane for `rows`, [rows, K] uint8."""
        bits = self.bits[rows]
        if self.num_bits == 8 or self.has_bytes:
            return bits
        shifts = torch.arange(0, 8, self.num_bits, dtype=torch.uint8, device=bits.device)
        mask = (1 << self.num_bits) - 1
        return ((bits[..., None] >> shifts) & mask).flatten(1)


@dataclass(frozen=True, slots=True)
class GroupValues:
    """Scales or offsets of the groups of inputs.

    `numbers`: [N / rows_per_group, G], of any dtype. `super_scales`: [N / rows_per_group, G / S]
    float, a factor of S neighbouring `numbers`; None for 1. `shared_scale`: a factor of all.
    """

    numbers: Tensor
    super_scales: Tensor | None = None
    shared_scale: float = 1.0

    def on(self, device: torch.device) -> GroupValues:
        """Returns the numbers on `device`."""
        factors = None if self.super_scales is None else self.super_scales.to(device)
        return GroupValues(self.numbers.to(device), factors, self.shared_scale)

    def of_rows(self, rows: slice | Tensor) -> GroupValues:
        """Returns the numbers of some rows (of groups)."""
        factors = None if self.super_scales is None else self.super_scales[rows]
        return GroupValues(self.numbers[rows], factors, self.shared_scale)

    def as_float32(self, rows: slice) -> Tensor:
        """Returns the numbers of `rows` (of groups), [rows, G] float32."""
        numbers = self.numbers[rows].float()
        if self.super_scales is not None:
            factors = self.super_scales[rows].float()
            numbers = numbers * factors.repeat_interleave(
                numbers.shape[1] // factors.shape[1], dim=1
            )
        return numbers if self.shared_scale == 1.0 else numbers * self.shared_scale


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights [N, K] of a linear layer as codes, scales and offsets; no bit of the file is lost.

    `planes`: the bits of the codes, lowest first. `values`: [2 ** bits] float32, the number that
    each code stands for; None if that is the code itself. `scales`: of each group of `group_size`
    inputs and `rows_per_group` outputs. `zero_points`: codes that stand for 0, per group: the
    offset is their product with the scale. `offsets`: offsets per group. At most one of
    `zero_points` and `offsets` is set. `input_order`: [K] int64, the input that each column of the
    codes belongs to; None if they are in order. `dtype`: in which the layer computes.
    `has_float8_inputs`: the checkpoint was made for inputs that are rounded to float8_e4m3fn.
    Raises ValueError if they are not all on one device.
    """

    planes: tuple[CodePlane, ...]
    values: Tensor | None
    scales: GroupValues
    group_size: int
    dtype: torch.dtype
    rows_per_group: int = 1
    zero_points: Tensor | None = None
    offsets: GroupValues | None = None
    input_order: Tensor | None = None
    has_float8_inputs: bool = False

    def __post_init__(self) -> None:
        devices = {str(tensor.device) for tensor in self._tensors()}
        if len(devices) > 1:
            raise ValueError(f"packed weights on several devices: {', '.join(sorted(devices))}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        plane = self.planes[0]
        return plane.bits.shape[0], plane.num_inputs

    @property
    def num_bits(self) -> int:
        """Bits of a code."""
        return sum(plane.num_bits for plane in self.planes)

    @property
    def num_bytes(self) -> int:
        """Total bytes of codes, scales and offsets."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (plane.bits for plane in self.planes)
        for group in (self.scales, self.offsets):
            if group is not None:
                yield group.numbers
                if group.super_scales is not None:
                    yield group.super_scales
        for tensor in (self.values, self.zero_points, self.input_order):
            if tensor is not None:
                yield tensor

    def on(self, device: torch.device) -> PackedWeight:
        """Returns the weights on `device`."""
        values, zero_points, input_order = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.values, self.zero_points, self.input_order)
        )
        return replace(
            self,
            planes=tuple(plane.on(device) for plane in self.planes),
            values=values,
            scales=self.scales.on(device),
            zero_points=zero_points,
            offsets=None if self.offsets is None else self.offsets.on(device),
            input_order=input_order,
        )

    def codes(self, rows: slice) -> Tensor:
        """Returns the codes of `rows`, [rows, K] uint8; of one plane without a copy."""
        codes, shift = self.planes[0].unpacked(rows), self.planes[0].num_bits
        for plane in self.planes[1:]:
            codes = codes | plane.unpacked(rows) << shift
            shift += plane.num_bits
        return codes

    def of_rows(self, rows: slice) -> PackedWeight:
        """Returns the weights of some outputs, each with groups of its own."""
        groups: slice | Tensor = rows
        if self.rows_per_group > 1:
            groups = torch.arange(rows.start, rows.stop) // self.rows_per_group
        return replace(
            self,
            planes=tuple(plane.of_rows(rows) for plane in self.planes),
            scales=self.scales.of_rows(groups),
            rows_per_group=1,
            zero_points=None if self.zero_points is None else self.zero_points[groups],
            offsets=None if self.offsets is None else self.offsets.of_rows(groups),
        )

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weights [N, K] in `dtype`, by default that of the layer.

        Computes in float32 and rounds once.
        """
        num_outputs, num_inputs = self.shape
        device = self.planes[0].bits.device
        result = torch.empty(num_outputs, num_inputs, dtype=dtype or self.dtype, device=device)
        rows = max(1, _CHUNK_ELEMENTS // num_inputs // self.rows_per_group) * self.rows_per_group
        for start in range(0, num_outputs, rows):
            part = slice(start, min(start + rows, num_outputs))
            numbers = self._float32_rows(part)
            if self.input_order is None:
                result[part] = numbers
            else:
                result[part, self.input_order] = numbers.to(result.dtype)
        return result

    def _float32_rows(self, rows: slice) -> Tensor:
        """Returns the weights of `rows` [rows, K], inputs in the order of the codes."""
        group_rows = slice(rows.start // self.rows_per_group, -(-rows.stop // self.rows_per_group))
        numbers = self._numbers(rows)
        scales = self._spread(self.scales.as_float32(group_rows), rows)
        grouped = self._in_groups(numbers)
        if self.zero_points is not None:
            grouped -= self._spread(self.zero_points[group_rows].float(), rows)
        grouped *= scales
        if self.offsets is not None:
            grouped -= self._spread(self.offsets.as_float32(group_rows), rows)
        return grouped.flatten(1)[:, : self.shape[1]]

    def _numbers(self, rows: slice) -> Tensor:
        """Returns what the codes of `rows` stand for, [rows, K] float32."""
        codes = self.codes(rows)
        if self.values is None:
            return codes.float()
        steps = self.values - torch.arange(len(self.values), device=self.values.device)
        if bool((steps == steps[0]).all()):
            return codes.float().add_(steps[0])
        if len(self.values) == 256 and bool((steps[:128] == 0).all() & (steps[128:] == -256).all()):
            return codes.view(torch.int8).float()
        # Several times as fast as indexing.
        return self.values.expand(len(codes), -1).gather(1, codes.long())

    def _in_groups(self, numbers: Tensor) -> Tensor:
        """Returns `numbers` [rows, K] as [rows, G, group size], padded to whole groups."""
        padding = -numbers.shape[1] % self.group_size
        if padding:
            numbers = torch.nn.functional.pad(numbers, (0, padding))
        return numbers.reshape(len(numbers), -1, self.group_size)

    def _spread(self, groups: Tensor, rows: slice) -> Tensor:
        """Returns the numbers of groups as [rows, G, 1], those of shared groups for each row."""
        if self.rows_per_group > 1:
            groups = groups.repeat_interleave(self.rows_per_group, dim=0)
        return groups[: rows.stop - rows.start, :, None]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Packed weights [N, K] that are read from their file when they are used, and not kept.

    `shape`: N and K. `dtype`: in which the layer computes. `read`: returns the weights of some
    outputs. `is_read_whole`: whether it takes as long for some outputs as for all.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[slice], PackedWeight]
    is_read_whole: bool = False

    @classmethod
    def of(cls, weight: PackedWeight) -> StoredWeight:
        """Returns weights that are in memory."""
        return cls(weight.shape, weight.dtype, weight.of_rows)

    def in_memory(self) -> StoredWeight:
        """Returns the weights as they are in memory if they cannot be read in parts."""
        return StoredWeight.of(self.read(slice(0, self.shape[0]))) if self.is_read_whole else self

    def parts(self) -> Iterator[tuple[slice, PackedWeight]]:
        """Yields slices of outputs with their weights, in order."""
        num_outputs, num_inputs = self.shape
        source = self.in_memory()
        size = max(1, _CHUNK_ELEMENTS // num_inputs)
        for start in range(0, num_outputs, size):
            rows = slice(start, min(start + size, num_outputs))
            yield rows, source.read(rows)

    def dequantized(
        self,
        dtype: torch.dtype | None = None,
        num_outputs: int | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Returns the weights [N, K] in `dtype`, by default that of the layer.

        `num_outputs`: the first of them only. `device`: where they are dequantised, and stay; None
        for the CPU.
        """
        result = torch.empty(self.shape, dtype=dtype or self.dtype, device=device or "cpu")
        for rows, part in self.parts():
            result[rows] = part.on(result.device).dequantized(result.dtype)
            if num_outputs is not None and rows.stop >= num_outputs:
                return result[:num_outputs].clone()
        return result


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights of all experts of a layer, one matrix each, all of one shape and dtype.

    `are_inputs_first`: whether the plain tensor is [experts, K, N] and not [experts, N, K].
    """

    experts: tuple[PackedWeight, ...]
    are_inputs_first: bool = False

    @property
    def num_bytes(self) -> int:
        """Total bytes of all experts."""
        return sum(expert.num_bytes for expert in self.experts)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the plain tensor in `dtype`, by default that of the layer."""
        weights = [expert.dequantized(dtype) for expert in self.experts]
        return torch.stack([each.T for each in weights] if self.are_inputs_first else weights)
