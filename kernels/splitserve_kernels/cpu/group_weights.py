"""Packing of quantised weights for native kernels, which multiply with their codes.

Shape letters: N outputs, K inputs, n outputs that are packed at once, G groups of 32 inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.cpu.library import CGroupRows, NativeLibrary, pointer
from splitserve_kernels.cpu.operations import PackedLinear
from splitserve_kernels.packed_weight import (
    GroupValues,
    NotPackable,
    PackedWeight,
    StoredWeight,
)

_GROUP, _BLOCK = 32, 256
# Numbers of a group, as in group_weights.h.
_SCALE, _ZERO, _OFFSET, _SUB, _HALVES, _SCALE_HALVES, _FLOAT8 = range(7)
# The largest scale of an output, in float16, unless the scales are float16 already: small ones
# keep their bits, and offsets of some times the scale have room.
_LARGEST_SCALE = 2.0**6


@dataclass(frozen=True, slots=True)
class _Form:
    """Layout of a weight in panels. `numbers`, `kind`: as in group_weights.h.

    `num_bits`: 4, 6 or 8. `codes`: [2 ** bits] uint8, the code in the panels of each code; None if
    it stays. `factor`: of the scales, so that the values of codes are integers.
    """

    numbers: int
    num_bits: int
    codes: Tensor | None
    factor: float

    @property
    def kind(self) -> int:
        return 3 * self.numbers + (self.num_bits - 4) // 2


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Weights that fill some outputs of a matrix. `outputs`: [N] int32, where each belongs."""

    weight: StoredWeight
    outputs: npt.NDArray[np.int32]


def pack_groups(
    library: NativeLibrary,
    parts: Sequence[GroupPart],
    num_outputs: int,
    bias: Tensor | None = None,
    *,
    is_exact: bool = False,
) -> PackedLinear:
    """Packs the weights of `parts`, all with the same inputs, and `bias` [num_outputs].

    `num_outputs`: of the matrix; those of no part are zeros. `is_exact`: rows are not rounded when
    they are multiplied with the matrix; nor are they where weights are 8-bit floats. Raises
    NotPackable.
    """
    parts = [GroupPart(part.weight.in_memory(), part.outputs) for part in parts]
    panel, num_inputs = library.panel, parts[0].weight.shape[1]
    num_panels = -(-num_outputs // panel)
    forms = [_form(part.weight) for part in parts]
    kinds = np.full(num_panels, -1, np.int64)
    for part, form in zip(parts, forms, strict=True):
        of_part = np.unique(part.outputs // panel)
        if bool(((kinds[of_part] >= 0) & (kinds[of_part] != form.kind)).any()):
            raise NotPackable("layers that are multiplied together have different formats")
        kinds[of_part] = form.kind
    kinds = np.maximum(kinds, 0)
    sizes = {kind: library.group_panel_bytes(int(kind), num_inputs) for kind in np.unique(kinds)}
    ends = np.cumsum([sizes[kind] for kind in kinds])
    packed = PackedLinear(
        panels=library.cleared_panels(int(ends[-1])),
        bias=None if bias is None else torch.zeros(num_panels * panel),
        scales=torch.ones(num_panels * panel),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        dtype=parts[0].weight.dtype,
        kinds=torch.from_numpy(kinds.astype(np.uint8)),
        starts=torch.from_numpy(np.concatenate(([0], ends[:-1]))),
        order=_order(parts),
        is_exact=is_exact or any(form.numbers == _FLOAT8 for form in forms),
    )
    if packed.bias is not None and bias is not None:
        packed.bias[:num_outputs] = bias.detach()
    for part, form in zip(parts, forms, strict=True):
        for rows, weight in part.weight.parts():
            _pack_rows(library, packed, weight, form, part.outputs[rows])
    return packed


def _order(parts: Sequence[GroupPart]) -> Tensor | None:
    """Returns the order of inputs that all parts share, [K] int32. Raises NotPackable."""
    first, *others = (part.weight.read(slice(0, 1)).input_order for part in parts)
    for other in others:
        if (first is None) != (other is None) or (
            first is not None and other is not None and not torch.equal(first, other)
        ):
            raise NotPackable("layers that are multiplied together have inputs in other orders")
    return None if first is None else first.to(torch.int32).contiguous()


def _form(stored: StoredWeight) -> _Form:
    """Returns the form of weights. Raises NotPackable."""
    weight = stored.read(slice(0, 1))
    if stored.shape[1] % _GROUP:
        raise NotPackable(f"{stored.shape[1]} inputs are no multiple of {_GROUP}")
    group_size = weight.group_size
    if group_size != 16 and group_size % _GROUP:
        raise NotPackable(f"groups have {group_size} inputs")
    if _is_float8(weight):
        return _Form(_FLOAT8, num_bits=8, codes=None, factor=1.0)
    is_plain = weight.values is None
    if not is_plain and (weight.offsets is not None or weight.zero_points is not None):
        raise NotPackable("codes of a table have zero points or offsets")
    if weight.scales.super_scales is not None:
        numbers = _numbers_of_blocks(weight, stored.shape[1])
    elif group_size == 16:
        if is_plain:
            raise NotPackable("groups of 16 inputs have zero points or offsets")
        numbers = _SCALE_HALVES
    elif weight.offsets is not None:
        numbers = _OFFSET
    else:
        numbers = _ZERO if is_plain else _SCALE
    if weight.values is not None:
        return _Form(numbers, *_integers(weight.values))
    widths = (4, 8) if numbers == _ZERO else (4, 6, 8)
    num_bits = next(width for width in widths if weight.num_bits <= width)
    return _Form(numbers, num_bits, codes=None, factor=1.0)


def _is_float8(weight: PackedWeight) -> bool:
    """Returns whether codes are floats of the kind e4m3."""
    values = weight.values
    if values is None or len(values) != 256 or weight.group_size % _GROUP:
        return False
    of_kind = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.equal(values.nan_to_num(0), of_kind.nan_to_num(0))


def _numbers_of_blocks(weight: PackedWeight, num_inputs: int) -> int:
    """Returns the numbers of weights whose scales are integers times a scale of a block."""
    scales, offsets = weight.scales, weight.offsets
    assert scales.super_scales is not None
    num_blocks = scales.super_scales.shape[1]
    is_regular = num_inputs == num_blocks * _BLOCK and scales.super_scales.dtype == torch.float16
    if not is_regular or weight.group_size not in (16, _GROUP):
        raise NotPackable("blocks of scales are not of 256 inputs")
    if offsets is None and weight.values is not None:
        return _HALVES
    if offsets is None or offsets.super_scales is None or weight.group_size != _GROUP:
        raise NotPackable(f"groups of {weight.group_size} inputs have zero points or offsets")
    return _SUB


def _integers(values: Tensor) -> tuple[int, Tensor, float]:
    """Returns the bits of a code in panels, the codes of `values` there, and the scales' factor.

    Raises NotPackable if the values are no integers times a number.
    """
    for factor in (1.0, 0.5):
        integers = values / factor
        if bool((integers == integers.round()).all()) and float(integers.abs().max()) <= 128:
            break
    else:
        raise NotPackable("the numbers of codes are no integers")
    for num_bits in (4, 6, 8):
        codes = integers + 2 ** (num_bits - 1)
        if float(codes.min()) >= 0 and float(codes.max()) < 2**num_bits:
            return num_bits, codes.to(torch.uint8), factor
    raise NotPackable("the numbers of codes are above 127")


def _pack_rows(
    library: NativeLibrary,
    packed: PackedLinear,
    weight: PackedWeight,
    form: _Form,
    outputs: npt.NDArray[np.int32],
) -> None:
    """Writes the weights of some outputs [n] to their places in the panels."""
    assert packed.kinds is not None
    assert packed.starts is not None
    assert packed.scales is not None
    rows = slice(0, weight.shape[0])
    codes = weight.codes(rows)
    if form.codes is not None:
        codes = _mapped(codes, form.codes)
    codes = codes.contiguous()
    if form.numbers == _FLOAT8 and bool((codes & 127 == 127).any()):
        raise NotPackable("weights are not finite")
    numbers, factors = _group_numbers(weight, form)
    tensors = [None if each is None else each.contiguous() for each in numbers]
    positions = np.ascontiguousarray(outputs)
    packed.scales[torch.from_numpy(positions).long()] = factors
    library.pack_groups(
        ctypes.byref(
            CGroupRows(
                pointer(codes),
                *(pointer(each) for each in tensors),
                positions.ctypes.data,
                len(positions),
                packed.num_inputs,
            )
        ),
        pointer(packed.kinds),
        pointer(packed.starts),
        pointer(packed.panels),
        ctypes.c_int32(torch.get_num_threads()),
    )


def _mapped(codes: Tensor, to: Tensor) -> Tensor:
    """Returns the codes that `to` has for `codes`."""
    steps = to.int() - torch.arange(len(to))
    if bool((steps == steps[0]).all()):
        return codes if not steps[0] else codes + steps[0].to(torch.uint8)
    if torch.equal(to.int(), torch.arange(len(to)) ^ 128):
        return codes ^ 128
    return torch.from_numpy(to.numpy()[codes.numpy()])


_Numbers = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _group_numbers(weight: PackedWeight, form: _Form) -> tuple[_Numbers, Tensor]:
    """Returns the numbers of groups and blocks as in `CGroupRows`, and a factor of each output."""
    num_rows, num_inputs = weight.shape
    scales, offsets = weight.scales, weight.offsets
    shared = torch.full((num_rows,), scales.shared_scale * form.factor)
    if form.numbers == _SUB:
        assert offsets is not None
        return (
            _bytes(scales, torch.uint8),
            _bytes(offsets, torch.uint8),
            scales.super_scales,
            offsets.super_scales,
        ), shared
    if form.numbers == _HALVES:
        halves = _bytes(scales, torch.int8)
        if weight.group_size == _GROUP:
            halves = halves.repeat_interleave(2, dim=1)
        return (halves, None, scales.super_scales, None), shared
    size, repeats = weight.group_size, max(1, weight.group_size // _GROUP)
    is_of_output = size >= num_inputs and form.numbers != _OFFSET
    # In 16 bits, weights are rounded more than their scales are here.
    is_exact = weight.dtype == torch.float32
    as_float16, factors = _float16(scales, is_of_output=is_of_output, is_exact=is_exact)

    def spread(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(repeats, dim=1)[:, : num_inputs // min(size, _GROUP)]

    second = None
    if form.numbers == _ZERO:
        second = torch.zeros(as_float16.shape, dtype=torch.uint8)
        if weight.zero_points is not None:
            second = _checked_bytes(weight.zero_points, torch.uint8)
        second = spread(second)
    elif form.numbers == _OFFSET:
        assert offsets is not None
        plain = offsets.as_float32(slice(None)) / factors[:, None]
        second = spread(plain.to(torch.float16))
        if not bool(torch.isfinite(second).all()):
            raise NotPackable("offsets are far larger than scales")
    return (spread(as_float16), second, None, None), factors * form.factor


def _bytes(values: GroupValues, dtype: torch.dtype) -> Tensor:
    return _checked_bytes(values.numbers, dtype)


def _checked_bytes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns integers as bytes. Raises NotPackable if they do not fit."""
    limits = torch.iinfo(dtype)
    if numbers.dtype != dtype and (numbers.min() < limits.min or numbers.max() > limits.max):
        raise NotPackable(f"zero points or scales are not from {limits.min} to {limits.max}")
    return numbers.to(dtype)


def _float16(scales: GroupValues, *, is_of_output: bool, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Returns scales in float16, [n, groups], and a factor of each output, [n] float32.

    `is_of_output`: there is one scale for an output; the factor is that scale. `is_exact`: scales
    must not be rounded, else to 11 bits. Raises NotPackable.
    """
    shared = scales.shared_scale
    plain = replace(scales, shared_scale=1.0).as_float32(slice(None))
    if is_of_output:
        return torch.ones(plain.shape, dtype=torch.float16), plain[:, 0] * shared
    if scales.numbers.dtype == torch.float16 and scales.super_scales is None:
        return scales.numbers, torch.full((len(plain),), shared)
    largest = plain.abs().amax(dim=1).clamp(min=1e-30)
    factors = torch.exp2(torch.floor(torch.log2(largest / _LARGEST_SCALE)))
    wide = plain / factors[:, None]
    rounded = wide.to(torch.float16)
    if is_exact and not torch.equal(rounded.float(), wide):
        raise NotPackable("scales have more bits than float16")
    return rounded, factors * shared
