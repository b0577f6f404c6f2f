"""Layers in the formats of compressed-tensors (Neural Magic, vLLM's llm-compressor).

Source: https://github.com/vllm-project/compressed-tensors. Activation schemes are not applied:
weights are exact. Activations stay in the dtype of the layer, except that GPUs round them to 8-bit
floats where that is declared, with a scale of each row, not with that of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization.codes import (
    E2M1_VALUES,
    centred_values,
    float8_values,
    planes_of_codes,
    planes_of_words,
    signed_values,
    unpack_dense,
)
from executor_service.quantization.weight_format import (
    check_dims,
    check_dtype,
    check_group_size,
    check_scales,
    check_shape,
    matrix_scales,
    plain_weight,
    take,
)
from splitserve_kernels.packed_weight import CodePlane, GroupValues, PackedWeight

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_PARTS = re.compile(
    r"^(?P<module>.+)\.(?P<part>weight_(?:packed|scale|shape|zero_point|g_idx|global_scale)"
    r"|input_(?:scale|zero_point|global_scale))$"
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Quantisation scheme of a group of layers; fields as in the configuration.

    `has_float8_inputs`: whether activations are declared as 8-bit floats.
    """

    format: str
    targets: tuple[str, ...]
    num_bits: int
    type: str
    strategy: str
    symmetric: bool
    group_size: int
    block: tuple[int, int]
    has_float8_inputs: bool

    def is_of(self, module: str) -> bool:
        """Returns whether the scheme is that of the module with this name."""
        return _matches(module, self.targets)


class CompressedTensors:
    """The format with `quant_method` compressed-tensors."""

    name = "compressed-tensors"

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Reads the declaration. Raises ModelUnsupported for a scheme that is not read."""
        groups = declared.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ModelUnsupported(
                "quantization_config.config_groups is missing, not served; supported: schemes of"
                " weights"
            )
        if declared.get("sparsity_config"):
            raise ModelUnsupported(
                "quantization_config.sparsity_config, not served; supported: dense weights"
            )
        common = str(declared.get("format", "dense"))
        self._schemes = [_scheme(name, group, common) for name, group in groups.items()]
        self._ignored = tuple(str(each) for each in declared.get("ignore") or ())

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Returns the weight and the part that a tensor belongs to, see `WeightFormat`."""
        found = _PARTS.match(tensor_name)
        if found:
            return f"{found['module']}.weight", found["part"]
        if tensor_name.endswith(".weight") and self._scheme_of(tensor_name) is not None:
            return tensor_name, "weight"
        return None

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedWeight | Tensor:
        """Returns the packed weight of a layer, see `WeightFormat`."""
        if "weight_scale" not in parts and "weight_packed" not in parts:
            return plain_weight(weight_name, take(parts, weight_name, "weight"), "weight_scale")
        scheme = self._scheme_of(weight_name)
        if scheme is None:
            raise ModelUnreadable(
                f"{weight_name} is quantised, and no group of quantization_config.config_groups"
                " names its layer"
            )
        match scheme.format:
            case "pack-quantized":
                return _pack_integers(weight_name, parts, scheme, dtype)
            case "nvfp4-pack-quantized" | "mxfp4-pack-quantized":
                return _pack_fp4(weight_name, parts, scheme, dtype)
            case _:
                return _pack_bytes(weight_name, parts, scheme, dtype)

    def _scheme_of(self, weight_name: str) -> WeightScheme | None:
        module = weight_name.removesuffix(".weight")
        if _matches(module, self._ignored):
            return None
        # Schemes that name layers come before those that name a class.
        named = (scheme for scheme in self._schemes if scheme.is_of(module))
        of_class = (scheme for scheme in self._schemes if "Linear" in scheme.targets)
        return next(named, None) or next(of_class, None)


def _matches(module: str, targets: Sequence[str]) -> bool:
    """Returns whether a target is the module's name, or a pattern that it begins with."""
    return any(
        re.match(target[3:], module) is not None if target.startswith("re:") else target == module
        for target in targets
    )


def _scheme(name: str, group: Any, common_format: str) -> WeightScheme:  # noqa: ANN401
    where = f"quantization_config.config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelUnsupported(
            f"{where}.weights is missing, not served; supported: schemes of weights"
        )
    weight_format = str(group.get("format") or common_format)
    if weight_format not in FORMATS:
        raise ModelUnsupported(
            f"{where}.format is {weight_format}, not served; supported: {', '.join(FORMATS)}"
        )
    num_bits, strategy = weights.get("num_bits", 8), weights.get("strategy")
    group_size, block = weights.get("group_size"), weights.get("block_structure")
    if isinstance(block, str):
        block = block.split("x")
    if strategy is None:
        strategy = "tensor" if group_size is None else "group" if group_size > 0 else "channel"
    if strategy not in _STRATEGIES:
        raise ModelUnsupported(
            f"{where}.weights.strategy is {strategy}, not served; supported:"
            f" {', '.join(_STRATEGIES)}"
        )
    if num_bits not in range(1, 9):
        raise ModelUnsupported(
            f"{where}.weights.num_bits is {num_bits}, not served; supported: 1 to 8"
        )
    return WeightScheme(
        format=weight_format,
        targets=tuple(str(target) for target in group.get("targets") or ()),
        num_bits=int(num_bits),
        type=str(weights.get("type", "int")),
        strategy=str(strategy),
        symmetric=bool(weights.get("symmetric", True)),
        group_size=int(group_size or 0),
        block=(int(block[0]), int(block[1])) if block else (1, 0),
        has_float8_inputs=_are_float8(group.get("input_activations")),
    )


def _are_float8(inputs: object) -> bool:
    return isinstance(inputs, dict) and (inputs.get("type"), inputs.get("num_bits")) == ("float", 8)


def _block(scheme: WeightScheme) -> tuple[int, int]:
    match scheme.strategy:
        case "block":
            return scheme.block
        case "group" | "tensor_group":
            return 1, scheme.group_size
        case _:
            return 1, 0


def _pack_integers(
    weight_name: str, parts: Mapping[str, Tensor], scheme: WeightScheme, dtype: torch.dtype
) -> PackedWeight:
    """Reads codes of 1 to 8 bits, packed in 32-bit words along the inputs."""
    module = weight_name.removesuffix(".weight")
    words = take(parts, weight_name, "weight_packed")
    check_dtype(f"{module}.weight_packed", words, torch.int32)
    shape = take(parts, weight_name, "weight_shape")
    check_shape(f"{module}.weight_shape", shape, [[2]])
    num_outputs, num_inputs = shape.tolist()
    num_bits = scheme.num_bits
    check_shape(f"{module}.weight_packed", words, [[num_outputs, -(-num_inputs * num_bits // 32)]])
    if scheme.group_size > 0:
        check_group_size(weight_name, num_inputs, scheme.group_size)
    scales, group_size, rows = matrix_scales(
        f"{module}.weight_scale",
        take(parts, weight_name, "weight_scale"),
        (num_outputs, num_inputs),
        _block(scheme),
    )
    planes, zero_points = planes_of_words(words, num_bits, num_inputs), None
    if not scheme.symmetric:
        stored = take(parts, weight_name, "weight_zero_point")
        num_groups = scales.numbers.shape[1]
        if stored.dtype == torch.int32:
            stored = unpack_dense(stored.T, num_bits, num_outputs).T
        else:
            stored = (stored.int() + 2 ** (num_bits - 1)).to(torch.uint8)
        check_shape(f"{module}.weight_zero_point", stored, [[num_outputs // rows, num_groups]])
        zero_points = stored
    order = None
    if "weight_g_idx" in parts:
        planes, order = _in_group_order(
            weight_name, unpack_dense(words, num_bits, num_inputs), parts["weight_g_idx"], scheme
        )
    return PackedWeight(
        planes=planes,
        values=None if zero_points is not None else centred_values(num_bits),
        scales=scales,
        group_size=group_size,
        rows_per_group=rows,
        zero_points=zero_points,
        input_order=order,
        dtype=dtype,
    )


def _in_group_order(
    weight_name: str, codes: Tensor, groups: Tensor, scheme: WeightScheme
) -> tuple[tuple[CodePlane, ...], Tensor | None]:
    """Sorts inputs by their group (`actorder`). Returns the planes and the order of the inputs."""
    order = order_of_groups(weight_name, groups, codes.shape[1], scheme.group_size)
    if order is not None:
        codes = codes[:, order]
    return planes_of_codes(codes, scheme.num_bits), order


def order_of_groups(
    weight_name: str, groups: Tensor, num_inputs: int, group_size: int
) -> Tensor | None:
    """Returns the order of the inputs in which groups are contiguous; None if they are already.

    `groups`: [K] group of each input; all -1 stands for no order. Raises ModelUnreadable if groups
    differ in size.
    """
    name = f"{weight_name.removesuffix('.weight')}.g_idx"
    check_shape(name, groups, [[num_inputs]])
    expected = torch.arange(num_inputs) // group_size
    if bool((groups == -1).all()) or torch.equal(groups.long(), expected):
        return None
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups.long()[order], expected):
        raise ModelUnreadable(f"{name} does not assign {group_size} inputs to each group")
    return order


def _pack_fp4(
    weight_name: str, parts: Mapping[str, Tensor], scheme: WeightScheme, dtype: torch.dtype
) -> PackedWeight:
    """Reads pairs of 4-bit floats with one scale for 16 inputs (nvfp4) or 32 (mxfp4)."""
    module = weight_name.removesuffix(".weight")
    packed = take(parts, weight_name, "weight_packed")
    check_dtype(f"{module}.weight_packed", packed, torch.uint8)
    check_dims(f"{module}.weight_packed", packed, 2)
    num_outputs, num_inputs = packed.shape[0], packed.shape[1] * 2
    is_mx = scheme.format.startswith("mxfp4")
    group_size = scheme.group_size or (32 if is_mx else 16)
    check_group_size(weight_name, num_inputs, group_size)
    scales = take(parts, weight_name, "weight_scale")
    check_shape(f"{module}.weight_scale", scales, [[num_outputs, num_inputs // group_size]])
    shared = 1.0
    if is_mx and scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    elif not is_mx:
        # The global scale was multiplied into the stored ones.
        common = take(parts, weight_name, "weight_global_scale")
        check_shape(f"{module}.weight_global_scale", common, [[1], []])
        check_scales(f"{module}.weight_global_scale", 1.0 / common)
        shared = 1.0 / float(common)
    check_scales(f"{module}.weight_scale", scales)
    return PackedWeight(
        planes=(CodePlane(packed, 4),),
        values=E2M1_VALUES,
        scales=GroupValues(scales, shared_scale=shared),
        group_size=group_size,
        dtype=dtype,
    )


def _pack_bytes(
    weight_name: str, parts: Mapping[str, Tensor], scheme: WeightScheme, dtype: torch.dtype
) -> PackedWeight:
    """Reads codes of one byte: 8-bit integers, or 8-bit floats."""
    module = weight_name.removesuffix(".weight")
    codes = take(parts, weight_name, "weight")
    check_dtype(weight_name, codes, torch.int8, torch.float8_e4m3fn)
    check_dims(weight_name, codes, 2)
    scales, group_size, rows = matrix_scales(
        f"{module}.weight_scale",
        take(parts, weight_name, "weight_scale"),
        codes.shape,
        _block(scheme),
    )
    is_int = codes.dtype == torch.int8
    zero_points = None
    if is_int and not scheme.symmetric:
        # Codes are shifted to be positive, as all zero points are stored.
        stored = take(parts, weight_name, "weight_zero_point")
        if stored.numel() == scales.numbers.numel():
            stored = stored.reshape(scales.numbers.shape)
        check_shape(f"{module}.weight_zero_point", stored, [scales.numbers.shape])
        zero_points = (stored.int() + 128).to(torch.uint8)
        codes = (codes.view(torch.uint8) ^ 0x80).view(torch.int8)
    values = signed_values(8) if is_int else float8_values(codes.dtype)
    return PackedWeight(
        planes=(CodePlane(codes.view(torch.uint8), 8),),
        values=None if zero_points is not None else values,
        scales=scales,
        group_size=group_size,
        rows_per_group=rows,
        zero_points=zero_points,
        dtype=dtype,
        has_float8_inputs=(
            scheme.has_float8_inputs and not is_int and group_size >= codes.shape[1]
        ),
    )
