"""Experts in MXFP4 as gpt-oss publishes them: 4-bit floats with a power of two for 32 inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor_service.quantization.codes import E2M1_VALUES
from executor_service.quantization.weight_format import check_dims, check_dtype, check_shape, take
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedExperts, PackedWeight

_PARTS = re.compile(r"^(?P<weight>.+)_(?P<part>blocks|scales)$")
_GROUP_SIZE = 32


class Mxfp4:
    """The format with `quant_method` mxfp4."""

    name = "mxfp4"

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Needs nothing of the declaration: quantised tensors have names of their own."""

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Returns the weight and the part that a tensor belongs to, see `WeightFormat`."""
        found = _PARTS.match(tensor_name)
        return None if found is None else (found["weight"], found["part"])

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedExperts:
        """Returns the packed weights of all experts, see `WeightFormat`."""
        blocks = take(parts, weight_name, "blocks", f"{weight_name}_blocks")
        scales = take(parts, weight_name, "scales", f"{weight_name}_scales")
        check_dtype(f"{weight_name}_blocks", blocks, torch.uint8)
        check_dtype(f"{weight_name}_scales", scales, torch.uint8)
        check_dims(f"{weight_name}_blocks", blocks, 4)
        num_experts, num_outputs, num_groups, num_bytes = blocks.shape
        check_shape(
            f"{weight_name}_blocks",
            blocks,
            [[num_experts, num_outputs, num_groups, _GROUP_SIZE // 2]],
        )
        check_shape(f"{weight_name}_scales", scales, [[num_experts, num_outputs, num_groups]])
        codes = blocks.reshape(num_experts, num_outputs, num_groups * num_bytes)
        powers = scales.view(torch.float8_e8m0fnu)
        experts = [
            PackedWeight(
                planes=(CodePlane(codes[expert], 4),),
                values=E2M1_VALUES,
                scales=GroupValues(powers[expert]),
                group_size=_GROUP_SIZE,
                dtype=dtype,
            )
            for expert in range(num_experts)
        ]
        return PackedExperts(tuple(experts), are_inputs_first=True)
