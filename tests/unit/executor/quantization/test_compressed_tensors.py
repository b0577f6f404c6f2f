"""Layers of compressed-tensors, written and dequantised by that package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization import CompressedTensors
from splitserve_kernels.packed_weight import PackedWeight
from tests.support.models.quantised_layers import compressed_tensors_layer

NUM_OUTPUTS, NUM_INPUTS = 192, 256
GROUPED = {"strategy": "group", "group_size": 64}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
CASES = [
    *(("pack-quantized", {"num_bits": bits, **GROUPED}) for bits in (2, 3, 4, 5, 6, 8)),
    ("pack-quantized", {"num_bits": 4, "symmetric": False, **GROUPED}),
    ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", **BLOCKS}),
    (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
]


def declaration(weight_format: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    arguments = QuantizationArgs(**settings).model_dump()
    group = {"targets": ["Linear"], "weights": arguments}
    return {"format": weight_format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def compressed(weight_format: str, settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the tensors of a random layer, and the weights that the package reads from them."""
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(0))
    return compressed_tensors_layer(weight, weight_format, settings)


def dequantized(packed: object) -> Tensor:
    assert isinstance(packed, PackedWeight)
    return packed.dequantized(torch.float32)


@pytest.mark.parametrize(("weight_format", "settings"), CASES)
def test_layer_has_the_weights_that_the_package_reads(
    weight_format: str, settings: dict[str, Any]
) -> None:
    parts, expected = compressed(weight_format, settings)
    reader = CompressedTensors(declaration(weight_format, settings))

    packed = reader.pack("model.layers.0.mlp.up_proj.weight", parts, torch.float32)

    # The package computes nvfp4 in bfloat16.
    tolerance = 2**-8 if weight_format.startswith("nvfp4") else 0.0
    torch.testing.assert_close(dequantized(packed), expected, rtol=tolerance, atol=0.0)


def test_layers_have_the_scheme_that_names_them() -> None:
    four_bits = {"num_bits": 4, **GROUPED}
    eight_bits = {"num_bits": 8, "strategy": "channel"}
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": four_bits | {"type": "int"},
            "format": "pack-quantized",
        },
        "group_1": {
            "targets": ["re:.*down_proj"],
            "weights": eight_bits | {"type": "int"},
            "format": "int-quantized",
        },
    }
    reader = CompressedTensors({"format": "mixed-precision", "config_groups": groups})
    for name, weight_format, settings in (
        ("up_proj", "pack-quantized", four_bits),
        ("down_proj", "int-quantized", eight_bits),
    ):
        parts, expected = compressed(weight_format, settings)

        packed = reader.pack(f"model.layers.0.mlp.{name}.weight", parts, torch.float32)

        torch.testing.assert_close(dequantized(packed), expected, rtol=0.0, atol=0.0)


def test_inputs_are_in_their_order_when_groups_are_sorted_by_activation() -> None:
    settings = {"num_bits": 4, **GROUPED}
    parts, expected = compressed("pack-quantized", settings)
    order = torch.randperm(NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    groups = torch.empty(NUM_INPUTS, dtype=torch.int32)
    groups[order] = torch.arange(NUM_INPUTS, dtype=torch.int32) // 64
    # The codes of the file are in the order of the inputs.
    shuffled = torch.empty_like(expected)
    shuffled[:, order] = expected
    codes = CompressedTensors(declaration("pack-quantized", settings)).pack(
        "a.weight", parts, torch.float32
    )
    unpacked = torch.empty(NUM_OUTPUTS, NUM_INPUTS, dtype=torch.uint8)
    assert isinstance(codes, PackedWeight)
    unpacked[:, order] = codes.planes[0].unpacked(slice(None))
    words = (unpacked[:, ::2] | unpacked[:, 1::2] << 4).contiguous().view(torch.int32)
    reader = CompressedTensors(declaration("pack-quantized", settings))

    packed = reader.pack(
        "a.weight", parts | {"weight_packed": words, "weight_g_idx": groups}, torch.float32
    )

    assert torch.equal(dequantized(packed), shuffled)


REFUSED = [
    ({"weight_scale": None}, "lack a.weight_scale"),
    ({"weight_scale": torch.ones(192, 3)}, r"a.weight_scale has shape \[192, 3\]; allowed"),
    ({"weight_scale": torch.full((192, 4), torch.nan)}, "a.weight_scale has values that are not"),
    ({"weight_packed": torch.zeros(192, 31, dtype=torch.int32)}, r"weight_packed has shape"),
    ({"weight_packed": torch.zeros(192, 32)}, "a.weight_packed is float32; allowed: int32"),
    ({"weight_shape": torch.tensor([192, 250])}, "groups of 64 do not divide"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_broken_layer_is_refused_by_the_name_of_its_tensor(
    change: dict[str, Tensor | None], message: str
) -> None:
    settings = {"num_bits": 4, **GROUPED}
    parts = compressed("pack-quantized", settings)[0] | change
    present = {name: tensor for name, tensor in parts.items() if tensor is not None}
    reader = CompressedTensors(declaration("pack-quantized", settings))

    with pytest.raises(ModelUnreadable, match=message):
        reader.pack("a.weight", present, torch.float32)


@pytest.mark.parametrize(
    ("weight_format", "settings", "change", "message"),
    [
        (
            "int-quantized",
            {"num_bits": 8, "strategy": "channel", "symmetric": False},
            {"weight_zero_point": torch.zeros(191, 1, dtype=torch.int8)},
            r"a.weight_zero_point has shape \[191, 1\]; allowed: \[192, 1\]",
        ),
        (
            "float-quantized",
            {"num_bits": 8, "type": "float", **BLOCKS},
            {"weight_scale": torch.ones(2, 3)},
            r"a.weight_scale has shape \[2, 3\]; allowed: \[2, 2\]",
        ),
        (
            "float-quantized",
            {"num_bits": 8, "type": "float", **BLOCKS},
            {"weight_scale": None},
            "lack a.weight_scale",
        ),
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            {"weight_global_scale": None},
            "lack a.weight_global_scale",
        ),
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            {"weight_packed": torch.zeros(192, 65, dtype=torch.uint8)},
            "a.weight has 130 inputs, and groups of 16 do not divide",
        ),
    ],
)
def test_broken_layer_of_another_format_is_refused_by_the_name_of_its_tensor(
    weight_format: str,
    settings: dict[str, Any],
    change: dict[str, Tensor | None],
    message: str,
) -> None:
    parts = compressed(weight_format, settings)[0] | change
    present = {name: tensor for name, tensor in parts.items() if tensor is not None}
    reader = CompressedTensors(declaration(weight_format, settings))

    with pytest.raises(ModelUnreadable, match=message):
        reader.pack("a.weight", present, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": {}}, "config_groups is missing"),
        (
            {"format": "marlin-24"},
            "config_groups.group_0.format is marlin-24, not served; supported: pack-quant",
        ),
        ({"sparsity_config": {"format": "sparse"}}, "sparsity_config, not served"),
    ],
)
def test_scheme_is_refused_when_it_is_not_read(change: dict[str, Any], message: str) -> None:
    declared = declaration("pack-quantized", {"num_bits": 4, **GROUPED})

    with pytest.raises(ModelUnsupported, match=message):
        CompressedTensors(declared | change)


def test_layer_stays_plain_when_it_is_ignored() -> None:
    reader = CompressedTensors(declaration("int-quantized", {"num_bits": 8, "strategy": "channel"}))

    assert reader.part_of("lm_head.weight") is None
    assert reader.part_of("model.norm.bias") is None
