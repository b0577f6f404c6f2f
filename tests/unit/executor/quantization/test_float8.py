"""Layers of 8-bit floats, 4-bit floats of gpt-oss, and bitsandbytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization import BitsAndBytes, Float8, Mxfp4
from splitserve_kernels.packed_weight import PackedExperts, PackedWeight

NUM_OUTPUTS, NUM_INPUTS = 200, 384
RANDOM = torch.Generator().manual_seed(0)
CODES = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=RANDOM).to(torch.float8_e4m3fn)
BLOCKS = {"weight_block_size": [128, 128]}


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=RANDOM) + 0.1


def dequantized(packed: object) -> Tensor:
    assert isinstance(packed, PackedWeight | PackedExperts)
    return packed.dequantized(torch.float32)


@pytest.mark.parametrize(
    ("declared", "part", "scales"),
    [
        (BLOCKS, "weight_scale_inv", positive(2, 3)),
        ({}, "weight_scale", positive(NUM_OUTPUTS, 1)),
        ({}, "weight_scale", positive(NUM_OUTPUTS)),
        ({}, "weight_scale", torch.tensor(0.5)),
    ],
    ids=["blocks", "outputs", "outputs_1d", "tensor"],
)
def test_float8_layer_is_codes_times_scales(
    declared: dict[str, Any], part: str, scales: Tensor
) -> None:
    packed = Float8(declared).pack("a.weight", {"weight": CODES, part: scales}, torch.bfloat16)

    spread = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if declared:
        spread = spread.repeat_interleave(128, 0)[:NUM_OUTPUTS].repeat_interleave(128, 1)
    assert torch.equal(dequantized(packed), CODES.float() * spread)


def test_layer_stays_plain_when_it_is_not_of_eight_bits() -> None:
    weight = torch.ones(3, 4, dtype=torch.bfloat16)

    assert Float8(BLOCKS).pack("a.weight", {"weight": weight}, torch.bfloat16) is weight


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"weight": CODES}, "lack a.weight_scale"),
        ({"weight": CODES, "weight_scale_inv": positive(2, 4)}, r"has shape \[2, 4\]; allowed"),
        ({"weight_scale_inv": positive(2, 3)}, "lack a.weight,"),
    ],
)
def test_broken_float8_layer_is_refused_by_the_name_of_its_tensor(
    parts: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        Float8(BLOCKS).pack("a.weight", parts, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "lack a_scales"),
        (
            {"blocks": torch.zeros(3, 8, 4, 15, dtype=torch.uint8)},
            r"a_blocks has shape .*; allowed",
        ),
        ({"blocks": torch.zeros(3, 8, 64, dtype=torch.uint8)}, "a_blocks .* allowed: 4 dimensions"),
        ({"scales": torch.zeros(3, 8, 3, dtype=torch.uint8)}, r"a_scales has shape \[3, 8, 3\]"),
        ({"scales": torch.zeros(3, 8, 4)}, "a_scales is float32; allowed: uint8"),
    ],
)
def test_broken_experts_are_refused_by_the_name_of_their_tensor(
    change: dict[str, Tensor | None], message: str
) -> None:
    parts = {
        "blocks": torch.zeros(3, 8, 4, 16, dtype=torch.uint8),
        "scales": torch.zeros(3, 8, 4, dtype=torch.uint8),
    } | change
    present = {name: tensor for name, tensor in parts.items() if tensor is not None}

    with pytest.raises(ModelUnreadable, match=message):
        Mxfp4({}).pack("a", present, torch.bfloat16)


FOUR_BITS = {
    "weight": torch.zeros(6 * 128 // 2, 1, dtype=torch.uint8),
    "absmax": torch.ones(12),
    "quant_map": torch.linspace(-1, 1, 16),
    "state": torch.tensor(list(b'{"shape": [6, 128], "blocksize": 64}'), dtype=torch.uint8),
}
EIGHT_BITS = {"weight": torch.zeros(6, 128, dtype=torch.int8), "SCB": torch.ones(6)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (FOUR_BITS | {"absmax": torch.ones(11)}, r"a.weight.absmax has shape \[11\]; allowed"),
        (FOUR_BITS | {"quant_map": torch.ones(8)}, r"a.weight.quant_map has shape \[8\]; allowed"),
        (FOUR_BITS | {"weight": torch.zeros(9, 1, dtype=torch.uint8)}, "a.weight has 9 bytes"),
        (
            FOUR_BITS | {"nested_absmax": torch.ones(12)},
            "lack a.weight.nested_quant_map",
        ),
        ({"weight": FOUR_BITS["weight"]}, "lack a.weight.quant_state.bitsandbytes__nf4"),
        (EIGHT_BITS | {"SCB": torch.ones(5)}, r"a.SCB has shape \[5\]; allowed: \[6\]"),
        ({"weight": EIGHT_BITS["weight"]}, "lack a.SCB"),
        (FOUR_BITS | {"state": torch.zeros(3, dtype=torch.uint8)}, "quant_state is not readable"),
    ],
)
def test_broken_layer_of_bitsandbytes_is_refused_by_the_name_of_its_tensor(
    parts: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        BitsAndBytes({}).pack("a.weight", parts, torch.bfloat16)


def test_eight_bit_layer_is_refused_when_its_codes_are_not_in_rows() -> None:
    layout = {"weight_format": torch.tensor(2, dtype=torch.uint8)}

    with pytest.raises(ModelUnsupported, match=r"a\.weight_format is 2, not served; supported: 0"):
        BitsAndBytes({}).pack("a.weight", EIGHT_BITS | layout, torch.bfloat16)


def test_experts_have_the_weights_that_transformers_reads() -> None:
    blocks = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8, generator=RANDOM)
    scales = torch.randint(118, 136, (3, 8, 4), dtype=torch.uint8, generator=RANDOM)
    # [experts, inputs, outputs]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)

    packed = Mxfp4({}).pack(
        "experts.down_proj", {"blocks": blocks, "scales": scales}, torch.bfloat16
    )

    assert torch.equal(dequantized(packed), expected)


@pytest.mark.parametrize("is_nested", [False, True])
def test_four_bit_layer_is_values_of_its_table_times_scales(*, is_nested: bool) -> None:
    codes = torch.randint(0, 16, (6, 128), dtype=torch.uint8, generator=RANDOM)
    table, absmax = torch.randn(16, generator=RANDOM), positive(12)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [6, 128]}
    parts = {"quant_map": table, "absmax": absmax}
    if is_nested:
        stored = torch.randint(0, 256, (12,), dtype=torch.uint8, generator=RANDOM)
        nested_table, nested_absmax = torch.randn(256, generator=RANDOM), positive(3)
        state |= {"nested_blocksize": 4, "nested_offset": 0.25}
        parts = {
            "quant_map": table,
            "absmax": stored,
            "nested_absmax": nested_absmax,
            "nested_quant_map": nested_table,
        }
        absmax = nested_table[stored.int()] * nested_absmax.repeat_interleave(4) + 0.25
    parts["weight"] = (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    parts["state"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    packed = BitsAndBytes({}).pack("a.weight", parts, torch.bfloat16)

    expected = table[codes.int()] * absmax.reshape(6, 2).repeat_interleave(64, 1)
    assert torch.equal(dequantized(packed), expected)


def test_eight_bit_layer_is_integers_times_the_scale_of_an_output() -> None:
    codes = torch.randint(-128, 128, (6, 128), dtype=torch.int8, generator=RANDOM)
    largest = positive(6)

    packed = BitsAndBytes({}).pack("a.weight", {"weight": codes, "SCB": largest}, torch.bfloat16)

    expected = codes.float() * (largest[:, None] / 127)
    assert torch.equal(dequantized(packed), expected)
