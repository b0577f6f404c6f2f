"""Layers of GPTQ and AWQ, compared with the definitions of their files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization import Awq, Gptq
from tests.support.models.quantised_layers import awq_layer, gptq_layer

NUM_OUTPUTS, NUM_INPUTS, GROUP_SIZE = 64, 96, 32


WEIGHT = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(0))
IN_ORDER = np.arange(NUM_INPUTS) // GROUP_SIZE
SORTED_BY_ACTIVATION = np.random.default_rng(9).permutation(IN_ORDER)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("version", "subtracted"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("groups", [IN_ORDER, SORTED_BY_ACTIVATION], ids=["in_order", "act_order"])
def test_gptq_layer_has_the_weights_of_its_definition(
    num_bits: int, version: str, subtracted: int, groups: np.ndarray
) -> None:
    parts, expected = gptq_layer(WEIGHT, num_bits, groups, subtracted=subtracted)
    reader = Gptq({"bits": num_bits, "group_size": GROUP_SIZE, "checkpoint_format": version})

    packed = reader.pack("a.weight", parts, torch.float16)

    assert torch.equal(packed.dequantized(torch.float32), expected)


def test_gptq_layer_has_bits_of_its_own_when_a_pattern_names_it() -> None:
    parts, expected = gptq_layer(WEIGHT, 8, IN_ORDER)
    override = {"bits": 8}
    declared = {"bits": 4, "group_size": GROUP_SIZE, "dynamic": {r"+:.*\.down_proj": override}}

    packed = Gptq(declared).pack("layers.0.down_proj.weight", parts, torch.float32)

    assert torch.equal(packed.dequantized(), expected)


def test_awq_layer_has_the_weights_of_its_definition() -> None:
    parts, expected = awq_layer(WEIGHT, GROUP_SIZE)

    packed = Awq({"bits": 4, "group_size": GROUP_SIZE}).pack("a.weight", parts, torch.float16)

    assert torch.equal(packed.dequantized(torch.float32), expected)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scales", None, "lack a.scales"),
        ("scales", torch.ones(2, NUM_OUTPUTS), r"a.scales has shape \[2, 64\]; allowed: \[3, 64\]"),
        ("scales", torch.full((3, 64), torch.inf), "a.scales has values that are not finite"),
        ("qzeros", torch.zeros(3, 7, dtype=torch.int32), r"a.qzeros has shape \[3, 7\]"),
        ("qweight", torch.zeros(12, 64), "a.qweight is float32; allowed: int32"),
        ("qweight", torch.zeros(13, 64, dtype=torch.int32), "groups of 32 do not divide"),
        ("g_idx", torch.zeros(96, dtype=torch.int32), "a.g_idx does not assign 32 inputs"),
    ],
)
def test_broken_gptq_layer_is_refused_by_the_name_of_its_tensor(
    part: str, tensor: Tensor | None, message: str
) -> None:
    parts = {
        name: each for name, each in gptq_layer(WEIGHT, 4, IN_ORDER)[0].items() if name != part
    }
    if tensor is not None:
        parts[part] = tensor

    with pytest.raises(ModelUnreadable, match=message):
        Gptq({"bits": 4, "group_size": GROUP_SIZE}).pack("a.weight", parts, torch.float16)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("qzeros", None, "lack a.qzeros"),
        ("scales", torch.ones(2, NUM_OUTPUTS), r"a.scales has shape \[2, 64\]; allowed: \[3, 64\]"),
        ("qzeros", torch.zeros(3, 7, dtype=torch.int32), r"a.qzeros has shape \[3, 7\]"),
        ("qweight", torch.zeros(95, 8, dtype=torch.int32), "groups of 32 do not divide"),
        ("qweight", torch.zeros(96, dtype=torch.int32), "a.qweight has .* allowed: 2 dimensions"),
    ],
)
def test_broken_awq_layer_is_refused_by_the_name_of_its_tensor(
    part: str, tensor: Tensor | None, message: str
) -> None:
    parts = {name: each for name, each in awq_layer(WEIGHT, 32)[0].items() if name != part}
    if tensor is not None:
        parts[part] = tensor

    with pytest.raises(ModelUnreadable, match=message):
        Awq({"bits": 4, "group_size": 32}).pack("a.weight", parts, torch.float16)


@pytest.mark.parametrize(
    ("reader", "declared", "message"),
    [
        (Gptq, {"bits": 5}, "bits is 5, not served; supported: 2, 3, 4, 8"),
        (
            Gptq,
            {"bits": 4, "checkpoint_format": "marlin"},
            "marlin, not served; supported: gptq",
        ),
        (Awq, {"bits": 4, "version": "gemv"}, "version is gemv, not served; supported: gemm"),
        (Awq, {"bits": 8}, "bits is 8, not served; supported: 4"),
    ],
)
def test_variant_is_refused_when_it_is_not_read(
    reader: type[Gptq | Awq], declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        reader(declared)
