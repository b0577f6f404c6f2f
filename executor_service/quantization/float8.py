"""Layers of 8-bit floats with scales for the tensor, its outputs, or blocks of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnsupported
from executor_service.quantization.codes import float8_values
from executor_service.quantization.weight_format import (
    check_dims,
    check_dtype,
    matrix_scales,
    plain_weight,
    take,
)
from splitserve_kernels.packed_weight import CodePlane, PackedWeight

_PARTS = re.compile(
    r"^(?P<module>.+)\.(?P<part>weight_scale_inv|weight_scale|input_scale|activation_scale"
    r"|input_scale_ub)$"
)


class Float8:
    """The formats with `quant_method` fp8 (DeepSeek, Qwen) and fbgemm_fp8.

    Activations stay in the dtype of the layer, except that GPUs round them to 8-bit floats beside
    weights without blocks, with a scale of each row: scales of the checkpoint are not applied.
    """

    name = "fp8"

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Reads the declaration. Raises ModelUnsupported for a variant that is not read."""
        block = declared.get("weight_block_size")
        if block is not None and (not isinstance(block, list) or len(block) != 2):
            raise ModelUnsupported(
                f"quantization_config.weight_block_size is {block}, not served; supported: the"
                " rows and columns of a block"
            )
        self._block = (int(block[0]), int(block[1])) if block else (1, 0)

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Returns the weight and the part that a tensor belongs to, see `WeightFormat`."""
        found = _PARTS.match(tensor_name)
        if found:
            return f"{found['module']}.weight", found["part"]
        return (tensor_name, "weight") if tensor_name.endswith(".weight") else None

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedWeight | Tensor:
        """Returns the packed weight of a layer, see `WeightFormat`."""
        codes = take(parts, weight_name, "weight")
        if codes.dtype.itemsize > 1:
            return plain_weight(weight_name, codes, "weight_scale")
        check_dtype(weight_name, codes, torch.float8_e4m3fn, torch.float8_e5m2)
        check_dims(weight_name, codes, 2)
        part = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        scales, group_size, rows = matrix_scales(
            f"{weight_name.removesuffix('.weight')}.{part}",
            take(parts, weight_name, part),
            codes.shape,
            self._block,
        )
        return PackedWeight(
            planes=(CodePlane(codes.view(torch.uint8), 8),),
            values=float8_values(codes.dtype),
            scales=scales,
            group_size=group_size,
            rows_per_group=rows,
            dtype=dtype,
            has_float8_inputs=group_size >= codes.shape[1],
        )
