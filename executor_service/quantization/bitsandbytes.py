"""Layers as bitsandbytes stores them: 4-bit codes of a table, or 8-bit integers.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes, `QuantState` and `Int8Params`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization.codes import signed_values
from executor_service.quantization.weight_format import (
    check_dims,
    check_dtype,
    check_group_size,
    check_scales,
    check_shape,
    plain_weight,
    take,
)
from splitserve_common import parse_json
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedWeight

_STATE = "quant_state.bitsandbytes__"
_PARTS = re.compile(
    r"^(?P<module>.+)\.(?:weight\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map"
    rf"|{re.escape(_STATE)}(?:nf4|fp4))|(?P<int8_part>SCB|weight_format))$"
)
_INT8_MAX = 127.0


class BitsAndBytes:
    """The format with `quant_method` bitsandbytes: nf4, fp4 and int8."""

    name = "bitsandbytes"

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Needs nothing of the declaration: each layer describes itself."""

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Returns the weight and the part that a tensor belongs to, see `WeightFormat`."""
        found = _PARTS.match(tensor_name)
        if found:
            part = found["part"] or found["int8_part"]
            return f"{found['module']}.weight", "state" if part.startswith(_STATE) else part
        return (tensor_name, "weight") if tensor_name.endswith(".weight") else None

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedWeight | Tensor:
        """Returns the packed weight of a layer, see `WeightFormat`."""
        weight = take(parts, weight_name, "weight")
        if weight.dtype == torch.int8:
            scales = take(parts, weight_name, "SCB")
            module = weight_name.removesuffix(".weight")
            check_dims(weight_name, weight, 2)
            check_shape(f"{module}.SCB", scales, [[len(weight)]])
            check_scales(f"{module}.SCB", scales)
            _check_layout(module, parts)
            return PackedWeight(
                planes=(CodePlane(weight.view(torch.uint8), 8),),
                values=signed_values(8),
                scales=GroupValues(scales.float()[:, None] / _INT8_MAX),
                group_size=weight.shape[1],
                dtype=dtype,
            )
        if weight.dtype != torch.uint8:
            return plain_weight(weight_name, weight, "SCB")
        return _pack_four_bits(weight_name, weight, parts, dtype)


def _check_layout(module: str, parts: Mapping[str, Tensor]) -> None:
    """Raises ModelUnsupported unless 8-bit codes are in rows; other orders are of old GPUs."""
    layout = parts.get("weight_format")
    if layout is not None and (layout.numel() != 1 or int(layout) != 0):
        raise ModelUnsupported(
            f"{module}.weight_format is {layout.tolist()}, not served; supported: 0 (rows)"
        )


def _pack_four_bits(
    weight_name: str, weight: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype
) -> PackedWeight:
    stored = take(parts, weight_name, "state", f"{weight_name}.{_STATE}nf4")
    try:
        state = parse_json(bytes(stored.tolist()))
        num_outputs, num_inputs = map(int, state["shape"])
        group_size = int(state["blocksize"])
        absmax = take(parts, weight_name, "absmax", f"{weight_name}.absmax")
        if "nested_absmax" in parts:
            absmax = _nested(weight_name, absmax, parts, state)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnreadable(f"{weight_name}: its quant_state is not readable") from error
    check_dtype(f"{weight_name}.absmax", absmax, torch.float32)
    check_group_size(weight_name, num_inputs, group_size)
    num_groups = num_inputs // group_size
    check_shape(f"{weight_name}.absmax", absmax, [[num_outputs * num_groups]])
    check_scales(f"{weight_name}.absmax", absmax)
    if weight.numel() * 2 != num_outputs * num_inputs:
        raise ModelUnreadable(
            f"{weight_name} has {weight.numel()} bytes; allowed: {num_outputs * num_inputs // 2}"
        )
    table = take(parts, weight_name, "quant_map", f"{weight_name}.quant_map")
    check_shape(f"{weight_name}.quant_map", table, [[16]])
    # The first of two numbers is in the upper half of a byte.
    codes = weight.reshape(num_outputs, num_inputs // 2)
    return PackedWeight(
        planes=(CodePlane(codes << 4 | codes >> 4, 4),),
        values=table.float(),
        scales=GroupValues(absmax.reshape(num_outputs, num_groups)),
        group_size=group_size,
        dtype=dtype,
    )


def _nested(
    weight_name: str, absmax: Tensor, parts: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Tensor:
    """Returns scales that are themselves stored as codes of 8 bits, [groups] float32."""
    table = take(parts, weight_name, "nested_quant_map", f"{weight_name}.nested_quant_map")
    factors = parts["nested_absmax"]
    block = int(state["nested_blocksize"])
    check_shape(f"{weight_name}.nested_quant_map", table, [[256]])
    check_shape(f"{weight_name}.nested_absmax", factors, [[-(-absmax.numel() // block)]])
    spread = factors.float().repeat_interleave(block)[: absmax.numel()]
    return table.float()[absmax.flatten().int()] * spread + float(state["nested_offset"])
