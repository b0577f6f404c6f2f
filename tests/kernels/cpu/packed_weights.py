"""Random quantised weights of every kind that native kernels take.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from executor_service.quantization import (
    centred_values,
    float8_values,
    planes_of_codes,
    signed_values,
)
from splitserve_kernels.packed_weight import GroupValues, PackedWeight

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NUM_INPUTS = 512

_Make = Callable[[torch.Generator, int, int], PackedWeight]


def _codes(generator: torch.Generator, shape: tuple[int, int], num_bits: int) -> Tensor:
    return torch.randint(0, 2**num_bits, shape, generator=generator, dtype=torch.uint8)


def _scales(generator: torch.Generator, num_rows: int, num_groups: int) -> Tensor:
    return torch.rand(num_rows, num_groups, generator=generator) * 0.02 + 0.001


def _centred(num_bits: int, group_size: int, dtype: torch.dtype = torch.float16) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), num_bits), num_bits),
            centred_values(num_bits),
            GroupValues(_scales(generator, rows, inputs // group_size).to(dtype)),
            group_size,
            torch.float32,
        )

    return make


def _with_zeros(num_bits: int, group_size: int) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        num_groups = inputs // group_size
        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), num_bits), num_bits),
            None,
            GroupValues(_scales(generator, rows, num_groups).to(torch.bfloat16)),
            group_size,
            torch.float32,
            zero_points=_codes(generator, (rows, num_groups), num_bits).short(),
        )

    return make


def _with_offsets(num_bits: int) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        offsets = torch.randn(rows, inputs // 32, generator=generator).half()
        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), num_bits), num_bits),
            None,
            GroupValues(_scales(generator, rows, inputs // 32).half()),
            32,
            torch.float32,
            offsets=GroupValues(offsets),
        )

    return make


def _of_blocks(num_bits: int) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        def values() -> GroupValues:
            factors = _scales(generator, rows, inputs // 256).half()
            return GroupValues(_codes(generator, (rows, inputs // 32), 6), factors)

        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), num_bits), num_bits),
            None,
            values(),
            32,
            torch.float32,
            offsets=values(),
        )

    return make


def _halves(num_bits: int) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        numbers = _codes(generator, (rows, inputs // 16), 8).view(torch.int8)
        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), num_bits), num_bits),
            centred_values(num_bits),
            GroupValues(numbers, _scales(generator, rows, inputs // 256).half()),
            16,
            torch.float32,
        )

    return make


def _table(group_size: int, dtype: torch.dtype) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        num_groups = inputs // group_size
        powers = torch.randint(-9, -2, (rows, num_groups), generator=generator)
        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), 4), 4),
            torch.cat((E2M1, -E2M1)),
            GroupValues(torch.exp2(powers.float()).to(dtype), shared_scale=0.37),
            group_size,
            torch.float32,
        )

    return make


def _of_outputs(rows_per_group: int) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        return PackedWeight(
            planes_of_codes(_codes(generator, (rows, inputs), 8), 8),
            signed_values(8),
            GroupValues(_scales(generator, -(-rows // rows_per_group), 1)),
            inputs,
            torch.float32,
            rows_per_group=rows_per_group,
        )

    return make


def _float8(group_size: int, rows_per_group: int) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        numbers = torch.randn(rows, inputs, generator=generator)
        numbers[:, ::9] *= 2**-6  # some are subnormal
        codes = numbers.to(torch.float8_e4m3fn)
        num_groups = -(-inputs // group_size)
        return PackedWeight(
            planes_of_codes(codes.view(torch.uint8), 8),
            float8_values(torch.float8_e4m3fn),
            GroupValues(_scales(generator, -(-rows // rows_per_group), num_groups).bfloat16()),
            group_size,
            torch.float32,
            rows_per_group=rows_per_group,
        )

    return make


def _reordered(make_ordered: _Make) -> _Make:
    def make(generator: torch.Generator, rows: int, inputs: int) -> PackedWeight:
        order = torch.randperm(inputs, generator=generator)
        return replace(make_ordered(generator, rows, inputs), input_order=order)

    return make


KINDS: Mapping[str, _Make] = {
    "4_bits": _centred(4, 32),
    "4_bits_large_groups": _centred(4, 128, torch.bfloat16),
    "3_bits": _centred(3, 64),
    "5_bits": _centred(5, 32),
    "8_bits": _centred(8, 32),
    "zeros_4_bits": _with_zeros(4, 128),
    "zeros_2_bits": _with_zeros(2, 32),
    "zeros_8_bits": _with_zeros(8, NUM_INPUTS),
    "offsets_4_bits": _with_offsets(4),
    "offsets_5_bits": _with_offsets(5),
    "blocks_4_bits": _of_blocks(4),
    "blocks_5_bits": _of_blocks(5),
    "halves_3_bits": _halves(3),
    "halves_6_bits": _halves(6),
    "mxfp4": _table(32, torch.float8_e8m0fnu),
    "nvfp4": _table(16, torch.float8_e4m3fn),
    "outputs": _of_outputs(1),
    "pairs_of_outputs": _of_outputs(2),
    "act_order": _reordered(_with_zeros(4, 64)),
    "float8_blocks": _float8(128, 128),
    "float8_outputs": _float8(NUM_INPUTS, 1),
}


def random_weight(kind: str, num_outputs: int, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    return KINDS[kind](generator, num_outputs, NUM_INPUTS)
