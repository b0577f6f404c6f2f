"""Codes of quantised weights: packing of their bits, and the numbers that they stand for.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splitserve_kernels.packed_weight import CodePlane

# Numbers of four bits: a sign, two bits of exponent and one of mantissa (Open Compute Project,
# Microscaling Formats, version 1.0).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
# Bits of the planes that make up codes of a size.
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def float8_values(dtype: torch.dtype) -> Tensor:
    """Returns the number of each of the 256 codes of an 8-bit float `dtype`, [256] float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def signed_values(num_bits: int) -> Tensor:
    """Returns the number of each code of two's complement, [2 ** num_bits] float32."""
    half = 2 ** (num_bits - 1)
    return torch.cat((torch.arange(half), torch.arange(-half, 0))).float()


def centred_values(num_bits: int) -> Tensor:
    """Returns the number of each code that is stored plus 2 ** (num_bits - 1), float32."""
    half = 2 ** (num_bits - 1)
    return torch.arange(-half, half).float()


def planes_of_codes(codes: Tensor, num_bits: int) -> tuple[CodePlane, ...]:
    """Packs `codes` [N, K] uint8, each below 2 ** num_bits, into planes."""
    planes, shift = [], 0
    for plane_bits in _PLANES[num_bits]:
        part = (codes >> shift) & ((1 << plane_bits) - 1)
        planes.append(CodePlane(_packed(part, plane_bits), plane_bits))
        shift += plane_bits
    return tuple(planes)


def _packed(codes: Tensor, num_bits: int) -> Tensor:
    """Packs `codes` [N, K] uint8 into bytes, the first input of a byte in its lowest bits."""
    if num_bits == 8:
        return codes
    per_byte = 8 // num_bits
    padding = -codes.shape[1] % per_byte
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    result = codes[:, ::per_byte].clone()
    for index in range(1, per_byte):
        result |= codes[:, index::per_byte] << (index * num_bits)
    return result


def unpack_dense(words: Tensor, num_bits: int, num_codes: int) -> Tensor:
    """Returns codes that are packed in 32-bit words without gaps, [rows, num_codes] uint8.

    `words`: [rows, ceil(num_codes * num_bits / 32)] int32; code i has the bits from i * num_bits
    on, which may belong to two words.
    """
    data = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return data[:, :num_codes]
    if 8 % num_bits == 0:
        return CodePlane(data, num_bits).unpacked(slice(None))[:, :num_codes]
    data = torch.nn.functional.pad(data, (0, 1))
    starts = torch.arange(num_codes) * num_bits
    first, shift = starts // 8, (starts % 8).to(torch.int32)
    pairs: Tensor = data[:, first].int() | data[:, first + 1].int() << 8
    codes: Tensor = pairs >> shift & (2**num_bits - 1)
    return codes.to(torch.uint8)


def planes_of_words(words: Tensor, num_bits: int, num_inputs: int) -> tuple[CodePlane, ...]:
    """Returns the planes of codes that are packed along the inputs; see `unpack_dense`."""
    if 8 % num_bits == 0 and num_inputs * num_bits % 8 == 0:
        num_bytes = math.ceil(num_inputs * num_bits / 8)
        return (CodePlane(words.contiguous().view(torch.uint8)[:, :num_bytes], num_bits),)
    return planes_of_codes(unpack_dense(words, num_bits, num_inputs), num_bits)
