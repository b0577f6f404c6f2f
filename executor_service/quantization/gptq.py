"""Layers in the formats of GPTQ and AWQ: integers of few bits with a scale and zero per group.

Sources: https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnsupported
from executor_service.quantization.codes import planes_of_codes, unpack_dense
from executor_service.quantization.compressed_tensors import order_of_groups
from executor_service.quantization.weight_format import (
    check_dims,
    check_dtype,
    check_group_size,
    check_scales,
    check_shape,
    take,
)
from splitserve_kernels.packed_weight import GroupValues, PackedWeight

_PARTS = re.compile(r"^(?P<module>.+)\.(?P<part>qweight|qzeros|scales|g_idx)$")
# Position of each output among the 8 codes of a word.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _part_of(tensor_name: str) -> tuple[str, str] | None:
    found = _PARTS.match(tensor_name)
    return None if found is None else (f"{found['module']}.weight", found["part"])


class Gptq:
    """The format with `quant_method` gptq, in both versions of its checkpoints."""

    name = "gptq"

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Reads the declaration. Raises ModelUnsupported for a variant that is not read."""
        self._settings = dict(declared)
        stored = declared.get("checkpoint_format") or "gptq"
        if stored not in ("gptq", "gptq_v2"):
            raise ModelUnsupported(
                f"quantization_config.checkpoint_format is {stored}, not served; supported: gptq,"
                " gptq_v2"
            )
        # The first version stores zero points less 1.
        self._added_to_zeros = 1 if stored == "gptq" else 0
        self._overrides = declared.get("dynamic") or {}
        self._bits_of("")

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Returns the weight and the part that a tensor belongs to, see `WeightFormat`."""
        return _part_of(tensor_name)

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedWeight:
        """Returns the packed weight of a layer, see `WeightFormat`."""
        module = weight_name.removesuffix(".weight")
        num_bits, group_size = self._bits_of(module)
        words, zeros = take(parts, weight_name, "qweight"), take(parts, weight_name, "qzeros")
        scales = take(parts, weight_name, "scales")
        for part, tensor in (("qweight", words), ("qzeros", zeros)):
            check_dtype(f"{module}.{part}", tensor, torch.int32)
            check_dims(f"{module}.{part}", tensor, 2)
        num_inputs, num_outputs = words.shape[0] * 32 // num_bits, words.shape[1]
        group_size = num_inputs if group_size == -1 else group_size
        check_group_size(weight_name, num_inputs, group_size)
        num_groups = num_inputs // group_size
        check_shape(f"{module}.scales", scales, [[num_groups, num_outputs]])
        check_scales(f"{module}.scales", scales)
        check_shape(f"{module}.qzeros", zeros, [[num_groups, -(-num_outputs * num_bits // 32)]])
        codes = unpack_dense(words.T, num_bits, num_inputs)
        order = None
        if "g_idx" in parts:
            order = order_of_groups(weight_name, parts["g_idx"], num_inputs, group_size)
            codes = codes if order is None else codes[:, order]
        zero_points = unpack_dense(zeros, num_bits, num_outputs).T.short() + self._added_to_zeros
        return PackedWeight(
            planes=planes_of_codes(codes, num_bits),
            values=None,
            scales=GroupValues(scales.T.contiguous()),
            group_size=group_size,
            zero_points=zero_points.contiguous(),
            input_order=order,
            dtype=dtype,
        )

    def _bits_of(self, module: str) -> tuple[int, int]:
        """Returns the bits and the group size of a layer."""
        settings = self._settings
        for pattern, override in self._overrides.items():
            if pattern.startswith("-:") or not isinstance(override, dict):
                continue
            if re.match(pattern.removeprefix("+:"), module):
                settings = {**settings, **override}
                break
        num_bits, group_size = settings.get("bits"), settings.get("group_size", -1)
        if num_bits not in (2, 3, 4, 8):
            raise ModelUnsupported(
                f"quantization_config.bits is {num_bits}, not served; supported: 2, 3, 4, 8"
            )
        return int(num_bits), int(group_size)


class Awq:
    """The format with `quant_method` awq, in the layout of its GEMM kernels."""

    name = "awq"

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Reads the declaration. Raises ModelUnsupported for a variant that is not read."""
        version = str(declared.get("version") or "gemm").lower()
        if version != "gemm":
            raise ModelUnsupported(
                f"quantization_config.version is {version}, not served; supported: gemm"
            )
        num_bits = declared.get("bits", declared.get("w_bit"))
        if num_bits != 4:
            raise ModelUnsupported(
                f"quantization_config.bits is {num_bits}, not served; supported: 4"
            )
        self._group_size = int(declared.get("group_size", declared.get("q_group_size", 128)))

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Returns the weight and the part that a tensor belongs to, see `WeightFormat`."""
        return _part_of(tensor_name)

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedWeight:
        """Returns the packed weight of a layer, see `WeightFormat`."""
        module = weight_name.removesuffix(".weight")
        words, zeros = take(parts, weight_name, "qweight"), take(parts, weight_name, "qzeros")
        scales = take(parts, weight_name, "scales")
        for part, tensor in (("qweight", words), ("qzeros", zeros)):
            check_dtype(f"{module}.{part}", tensor, torch.int32)
            check_dims(f"{module}.{part}", tensor, 2)
        num_inputs, num_outputs = words.shape[0], words.shape[1] * 8
        group_size = num_inputs if self._group_size == -1 else self._group_size
        check_group_size(weight_name, num_inputs, group_size)
        num_groups = num_inputs // group_size
        check_shape(f"{module}.scales", scales, [[num_groups, num_outputs]])
        check_scales(f"{module}.scales", scales)
        check_shape(f"{module}.qzeros", zeros, [[num_groups, num_outputs // 8]])
        return PackedWeight(
            planes=planes_of_codes(_awq_codes(words, num_outputs).T.contiguous(), 4),
            values=None,
            scales=GroupValues(scales.T.contiguous()),
            group_size=group_size,
            zero_points=_awq_codes(zeros, num_outputs).T.contiguous(),
            dtype=dtype,
        )


def _awq_codes(words: Tensor, num_outputs: int) -> Tensor:
    """Returns the codes of words along the outputs, [rows, N] uint8, outputs in order."""
    codes = unpack_dense(words, 4, num_outputs).reshape(words.shape[0], -1, 8)
    return codes[:, :, list(_AWQ_ORDER)].flatten(1)
