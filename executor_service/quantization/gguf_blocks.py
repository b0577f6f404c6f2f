"""Blocks of quantised numbers in GGUF files, as packed weights.

A row of a matrix is a sequence of blocks of 32 or 256 numbers; each holds its codes, scales and
offsets. Source: ggml-quants.c and ggml-common.h of https://github.com/ggml-org/llama.cpp.

Shape letters: N outputs, B blocks of a row, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_service.quantization.codes import (
    E2M1_VALUES,
    centred_values,
    signed_values,
)
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedWeight

_IQ4_VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    dtype=torch.float32,
)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Unpacked blocks of a matrix; fields as in `PackedWeight`."""

    planes: tuple[CodePlane, ...]
    values: Tensor | None
    scales: GroupValues
    group_size: int
    offsets: GroupValues | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks. `num_elements`, `num_bytes`: of a block."""

    num_elements: int
    num_bytes: int
    unpack: Callable[[Tensor], _Layers]


def pack_blocks(type_name: str, data: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Returns the packed weight of a matrix. `data`: [N, bytes of a row] uint8."""
    block = BLOCK_TYPES[type_name]
    unpacked = block.unpack(data.reshape(len(data), -1, block.num_bytes))
    return PackedWeight(
        planes=unpacked.planes,
        values=unpacked.values,
        scales=unpacked.scales,
        group_size=unpacked.group_size,
        offsets=unpacked.offsets,
        dtype=dtype,
    )


def _plane(codes: Tensor, num_bits: int) -> tuple[CodePlane, ...]:
    return (CodePlane(codes, num_bits, has_bytes=True),)


def _float16(blocks: Tensor, start: int) -> Tensor:
    """Returns one float16 of each block, [N, B]."""
    return blocks[:, :, start : start + 2].contiguous().view(torch.float16).squeeze(2)


def _words(data: Tensor) -> Tensor:
    """Returns bytes as words of eight, so that one operation concerns eight codes."""
    if data.shape[:2] == (1, 1):  # counts as contiguous wherever it begins
        data = data.clone(memory_format=torch.contiguous_format)
    return data.contiguous().view(torch.int64)


def _each(byte: int) -> int:
    """Returns a word of eight equal bytes below 128."""
    return byte * 0x0101010101010101


def _nibbles(data: Tensor, half: int) -> Tensor:
    """Returns codes of four bits: of each `half` bytes first all low halves, then all high ones.

    `data`: [N, B, bytes] uint8. Returns [N, K].
    """
    words = _words(data).reshape(*data.shape[:2], -1, half // 8)
    codes = torch.stack((words & _each(15), words >> 4 & _each(15)), dim=3)
    return codes.flatten(1).view(torch.uint8)


def _bits(data: Tensor) -> Tensor:
    """Returns the bits of bytes, lowest first. `data`: [N, B, bytes]. Returns [N, K]."""
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q8_0(blocks: Tensor) -> _Layers:
    codes = blocks[:, :, 2:].flatten(1)
    return _Layers((CodePlane(codes, 8),), signed_values(8), GroupValues(_float16(blocks, 0)), 32)


def _q4_0(blocks: Tensor) -> _Layers:
    codes = _nibbles(blocks[:, :, 2:], 16)
    return _Layers(_plane(codes, 4), centred_values(4), GroupValues(_float16(blocks, 0)), 32)


def _q4_1(blocks: Tensor) -> _Layers:
    codes = _nibbles(blocks[:, :, 4:], 16)
    scales, offsets = GroupValues(_float16(blocks, 0)), GroupValues(-_float16(blocks, 2))
    return _Layers(_plane(codes, 4), None, scales, 32, offsets)


def _q5_0(blocks: Tensor) -> _Layers:
    codes = _nibbles(blocks[:, :, 6:], 16) | _bits(blocks[:, :, 2:6]) << 4
    return _Layers(_plane(codes, 5), centred_values(5), GroupValues(_float16(blocks, 0)), 32)


def _q5_1(blocks: Tensor) -> _Layers:
    codes = _nibbles(blocks[:, :, 8:], 16) | _bits(blocks[:, :, 4:8]) << 4
    scales, offsets = GroupValues(_float16(blocks, 0)), GroupValues(-_float16(blocks, 2))
    return _Layers(_plane(codes, 5), None, scales, 32, offsets)


def _pairs_of_bits(data: Tensor) -> Tensor:
    """Returns codes of two bits: of each 32 bytes first the lowest pairs. Returns [N, K]."""
    words = _words(data).reshape(*data.shape[:2], -1, 4)
    codes = torch.stack([words >> shift & _each(3) for shift in (0, 2, 4, 6)], dim=3)
    return codes.flatten(1).view(torch.uint8)


def _planes_of_bits(data: Tensor) -> Tensor:
    """Returns codes of one bit: bit i of the 32 bytes belongs to the i-th 32 numbers, [N, K]."""
    words = _words(data)
    codes = torch.stack([words >> shift & _each(1) for shift in range(8)], dim=2)
    return codes.flatten(1).view(torch.uint8)


def _q2_k(blocks: Tensor) -> _Layers:
    packed = blocks[:, :, :16].flatten(1)
    return _Layers(
        _plane(_pairs_of_bits(blocks[:, :, 16:80]), 2),
        None,
        GroupValues(packed & 15, _float16(blocks, 80)),
        16,
        GroupValues(packed >> 4, _float16(blocks, 82)),
    )


def _q3_k(blocks: Tensor) -> _Layers:
    codes = _pairs_of_bits(blocks[:, :, 32:96]) | _planes_of_bits(blocks[:, :, :32]) << 2
    packed = blocks[:, :, 96:108]
    low = torch.cat((packed[:, :, :8] & 15, packed[:, :, :8] >> 4), dim=2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = (packed[:, :, None, 8:] >> shifts & 3).flatten(2)
    scales = (low | upper << 4).to(torch.int8).flatten(1) - 32
    return _Layers(
        _plane(codes, 3),
        centred_values(3),
        GroupValues(scales, _float16(blocks, 108)),
        16,
    )


def _six_bit_scales(blocks: Tensor) -> tuple[GroupValues, GroupValues]:
    """Returns the scales and offsets of Q4_K and Q5_K, eight of each in a block."""
    first, second, third = torch.split(blocks[:, :, 4:16], 4, dim=2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    return (
        GroupValues(scales.flatten(1), _float16(blocks, 0)),
        GroupValues(offsets.flatten(1), _float16(blocks, 2)),
    )


def _q4_k(blocks: Tensor) -> _Layers:
    scales, offsets = _six_bit_scales(blocks)
    codes = _nibbles(blocks[:, :, 16:], 32)
    return _Layers(_plane(codes, 4), None, scales, 32, offsets)


def _q5_k(blocks: Tensor) -> _Layers:
    scales, offsets = _six_bit_scales(blocks)
    codes = _nibbles(blocks[:, :, 48:], 32) | _planes_of_bits(blocks[:, :, 16:48]) << 4
    return _Layers(_plane(codes, 5), None, scales, 32, offsets)


def _q6_k(blocks: Tensor) -> _Layers:
    low = _nibbles(blocks[:, :, :128], 64)
    codes = low | _pairs_of_bits(blocks[:, :, 128:192]) << 4
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    return _Layers(
        _plane(codes, 6), centred_values(6), GroupValues(scales, _float16(blocks, 208)), 16
    )


def _iq4_nl(blocks: Tensor) -> _Layers:
    codes = _nibbles(blocks[:, :, 2:], 16)
    return _Layers(_plane(codes, 4), _IQ4_VALUES, GroupValues(_float16(blocks, 0)), 32)


def _iq4_xs(blocks: Tensor) -> _Layers:
    high = blocks[:, :, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    low = torch.stack((blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4), dim=3)
    scales = (low.flatten(1) | high.flatten(1) << 4).to(torch.int8) - 32
    codes = _nibbles(blocks[:, :, 8:], 16)
    return _Layers(_plane(codes, 4), _IQ4_VALUES, GroupValues(scales, _float16(blocks, 0)), 32)


def _mxfp4(blocks: Tensor) -> _Layers:
    codes = _nibbles(blocks[:, :, 1:], 16)
    scales = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu)
    return _Layers(_plane(codes, 4), E2M1_VALUES, GroupValues(scales), 32)


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "IQ4_NL": BlockType(32, 18, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, _iq4_xs),
    "MXFP4": BlockType(32, 17, _mxfp4),
}
