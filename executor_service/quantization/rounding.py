"""Roundings of plain weights to codes of 4 or 8 bits at load.

Shape letters: N outputs, K inputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_service.quantization.codes import (
    centred_values,
    float8_values,
    planes_of_codes,
)
from splitserve_kernels.packed_weight import GroupValues, PackedWeight

GROUP_SIZE = 32
_LARGEST_4_BITS, _LARGEST_8_BITS = 15, 127
_FLOAT8 = torch.float8_e4m3fn
# Weights that are rounded at once; bounds the temporary memory.
_CHUNK_ELEMENTS = 2**20
# Ranges of a group that are tried, as shares of the range of its weights: with a smaller one most
# weights are rounded less, and the largest more.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)


def round_to_4_bits(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Returns `weight` [N, K] in 16 steps for each group, between a minimum and a maximum.

    Of some ranges the one with the smallest squared error is taken. K must be a multiple of 32.
    """
    parts = [_to_4_bits(rows.detach().float()) for rows in _in_chunks(weight)]
    codes, scales, offsets = (torch.cat(each) for each in zip(*parts, strict=True))
    return PackedWeight(
        planes=planes_of_codes(codes, 4),
        values=None,
        scales=GroupValues(scales),
        group_size=GROUP_SIZE,
        offsets=GroupValues(offsets),
        dtype=dtype,
    )


def round_to_8_bits(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Returns `weight` [N, K] in 127 steps on either side of 0 for each group."""
    parts = [_to_8_bits(rows.detach().float()) for rows in _in_chunks(weight)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return PackedWeight(
        planes=planes_of_codes(codes, 8),
        values=centred_values(8).to(codes.device),
        scales=GroupValues(scales),
        group_size=GROUP_SIZE,
        dtype=dtype,
    )


def round_to_float8(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Returns `weight` [N, K] as floats of 8 bits (e4m3), with one float32 scale for each output.

    The largest weight of an output becomes 448, the largest of these floats.
    """
    parts = [_to_float8(rows.detach().float()) for rows in _in_chunks(weight)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return PackedWeight(
        planes=planes_of_codes(codes, 8),
        values=float8_values(_FLOAT8).to(codes.device),
        scales=GroupValues(scales),
        group_size=weight.shape[1],
        dtype=dtype,
        has_float8_inputs=True,
    )


@dataclass(frozen=True, slots=True)
class Rounding:
    """Functions that round the weights of linear layers, of the head and of all `others`.

    They take weights [N, K], with K a multiple of 32, and the dtype in which the layer computes.
    """

    head: Callable[[Tensor, torch.dtype], PackedWeight]
    others: Callable[[Tensor, torch.dtype], PackedWeight]


ROUNDINGS: Mapping[str, Rounding] = {
    "int4": Rounding(head=round_to_8_bits, others=round_to_4_bits),
    "fp8": Rounding(head=round_to_8_bits, others=round_to_float8),
}


def _in_chunks(weight: Tensor) -> tuple[Tensor, ...]:
    return torch.split(weight, max(1, _CHUNK_ELEMENTS // weight.shape[1]))


def _to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes [N, K] uint8, scales and offsets [N, G] float16."""
    groups = weight.reshape(len(weight), -1, GROUP_SIZE)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, ...] | None = None
    for share in _SHARES:
        scales = (share * 2 * half / _LARGEST_4_BITS).to(torch.float16)
        offsets = (share * half - middle).to(torch.float16)
        wide, shift = scales.float(), offsets.float()
        steps = torch.where(wide > 0, (groups + shift) / wide, 0.0)
        codes = steps.round_().clamp_(0, _LARGEST_4_BITS)
        errors = (codes * wide - shift - groups).square_().sum(2, keepdim=True)
        tried = (errors, codes, scales, offsets)
        if best is None:
            best = tried
        else:
            is_better = errors < best[0]
            best = tuple(
                torch.where(is_better, new, old) for new, old in zip(tried, best, strict=True)
            )
    assert best is not None
    _, codes, scales, offsets = best
    return codes.flatten(1).to(torch.uint8), scales.flatten(1), offsets.flatten(1)


def _to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [N, K] uint8, and scales [N, G] float16."""
    groups = weight.reshape(len(weight), -1, GROUP_SIZE)
    scales = (groups.abs().amax(2, keepdim=True) / _LARGEST_8_BITS).to(torch.float16)
    wide = scales.float()
    steps = torch.where(wide > 0, groups / wide, 0.0).round_()
    codes = steps.clamp_(-_LARGEST_8_BITS - 1, _LARGEST_8_BITS).add_(128)
    return codes.flatten(1).to(torch.uint8), scales.flatten(1)


def _to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [N, K] uint8, and scales [N, 1] float32."""
    largest = torch.finfo(_FLOAT8).max
    scales = weight.abs().amax(1, keepdim=True) / largest
    numbers = torch.where(scales > 0, weight / scales, 0.0).clamp_(-largest, largest)
    return numbers.to(_FLOAT8).view(torch.uint8), scales
