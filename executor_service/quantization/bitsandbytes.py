"""Layers as bitsandbytes stores them: 4-bit codes of a table, or 8-bit integers.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes, `QuantState` and `Int8Params`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable
from executor_service.quantization.codes import signed_values
from executor_service.quantization.weight_format import (
    check_dtype,
    check_group_size,
    check_scales,
    check_shape,
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
            check_shape(f"{weight_name} (SCB)", scales, [[len(weight)]])
            return PackedWeight(
                planes=(CodePlane(weight.view(torch.uint8), 8),),
                values=signed_values(8),
                scales=GroupValues(scales.float()[:, None] / _INT8_MAX),
                group_size=weight.shape[1],
                dtype=dtype,
            )
        if weight.dtype != torch.uint8:
            return weight
        return _pack_four_bits(weight_name, weight, parts, dtype)


def _pack_four_bits(
    weight_name: str, weight: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype
) -> PackedWeight:
    stored = take(parts, weight_name, "state")
    try:
        state = parse_json(bytes(stored.tolist()))
        num_outputs, num_inputs = map(int, state["shape"])
        group_size = int(state["blocksize"])
        absmax = take(parts, weight_name, "absmax")
        if "nested_absmax" in parts:
            absmax = _nested(absmax, parts, state)
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
    # The first of two numbers is in the upper half of a byte.
    codes = weight.reshape(num_outputs, num_inputs // 2)
    return PackedWeight(
        planes=(CodePlane(codes << 4 | codes >> 4, 4),),
        values=take(parts, weight_name, "quant_map").float(),
        scales=GroupValues(absmax.reshape(num_outputs, num_groups)),
        group_size=group_size,
        dtype=dtype,
    )


def _nested(absmax: Tensor, parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Returns scales that are themselves stored as codes of 8 bits, [groups] float32."""
    numbers = parts["nested_quant_map"].float()[absmax.int()]
    factors = parts["nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))
    return numbers * factors[: len(numbers)] + float(state["nested_offset"])
