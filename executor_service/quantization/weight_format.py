"""What all formats of quantised checkpoints have in common.

A quantised layer is several tensors with the name of its module as prefix: codes, scales, zero
points. A `WeightFormat` says which tensors belong together and makes one `PackedWeight` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable
from splitserve_kernels.packed_weight import GroupValues, PackedExperts, PackedWeight

_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class WeightFormat(Protocol):
    """Format of the quantised layers of a checkpoint."""

    name: str

    def part_of(self, tensor_name: str) -> tuple[str, str] | None:
        """Splits a tensor's name into that of its layer's weight and of its part.

        Returns None for a tensor that belongs to no quantised layer.
        """

    def pack(
        self, weight_name: str, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> PackedWeight | PackedExperts | Tensor:
        """Returns the packed weights of a layer, or a plain tensor if it has no codes.

        `parts`: its tensors by the names of `part_of`. `dtype`: in which the layer computes.
        Raises ModelUnreadable if tensors are missing or have the wrong shape or dtype,
        ModelUnsupported for a variant that is not read.
        """


def take(
    parts: Mapping[str, Tensor], weight_name: str, part: str, tensor_name: str | None = None
) -> Tensor:
    """Returns a part of a layer. Raises ModelUnreadable if the checkpoint lacks it.

    `tensor_name`: its name in the checkpoint, if that is not the module's with the part's.
    """
    try:
        return parts[part]
    except KeyError:
        raise _lacks(weight_name, part, tensor_name) from None


def check_shape(name: str, tensor: Tensor, allowed: Sequence[Sequence[int]]) -> None:
    """Raises ModelUnreadable unless `tensor` has one of the `allowed` shapes."""
    if list(tensor.shape) not in [list(shape) for shape in allowed]:
        shapes = " or ".join(str(list(shape)) for shape in allowed)
        raise ModelUnreadable(f"{name} has shape {list(tensor.shape)}; allowed: {shapes}")


def check_dims(name: str, tensor: Tensor, num_dims: int) -> None:
    """Raises ModelUnreadable unless `tensor` has `num_dims` dimensions."""
    if tensor.ndim != num_dims:
        raise ModelUnreadable(
            f"{name} has shape {list(tensor.shape)}; allowed: {num_dims} dimensions"
        )


def plain_weight(weight_name: str, tensor: Tensor, scale: str) -> Tensor:
    """Returns the weight of a layer that is not quantised.

    Raises ModelUnreadable if it has codes. `scale`: the part that would be needed for these.
    """
    if tensor.dtype not in _PLAIN_DTYPES:
        raise _lacks(weight_name, scale)
    return tensor


def _lacks(weight_name: str, part: str, tensor_name: str | None = None) -> ModelUnreadable:
    name = tensor_name or f"{weight_name.removesuffix('.weight')}.{part}"
    return ModelUnreadable(
        f"the weights lack {name}, without which {weight_name} cannot be dequantised"
    )


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raises ModelUnreadable unless `tensor` has one of the `allowed` dtypes."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ModelUnreadable(f"{name} is {found}; allowed: {names}")


def check_group_size(weight_name: str, num_inputs: int, group_size: int) -> None:
    """Raises ModelUnreadable unless groups of `group_size` inputs divide the inputs evenly."""
    if group_size < 1 or num_inputs % group_size:
        raise ModelUnreadable(
            f"{weight_name} has {num_inputs} inputs, and groups of {group_size} do not divide them"
        )


def check_scales(name: str, scales: Tensor) -> None:
    """Raises ModelUnreadable unless all `scales` are finite numbers."""
    if not bool(torch.isfinite(scales.float()).all()):
        raise ModelUnreadable(f"{name} has values that are not finite; allowed: finite scales")


def matrix_scales(
    name: str, scales: Tensor, shape: Sequence[int], block: tuple[int, int] = (1, 0)
) -> tuple[GroupValues, int, int]:
    """Returns scales of a matrix, with their group size and rows per group.

    `scales`: one number, one for each output, or one for each block of the matrix. `shape`: N and
    K. `block`: rows and columns of a block; 0 columns for all.
    """
    num_outputs, num_inputs = shape
    check_scales(name, scales)
    if scales.numel() == 1:
        return GroupValues(scales.reshape(1, 1)), num_inputs, num_outputs
    rows, columns = block[0], block[1] or num_inputs
    expected = [-(-num_outputs // rows), -(-num_inputs // columns)]
    if scales.ndim == 1 and expected[1] == 1:
        scales = scales[:, None]
    check_shape(name, scales, [expected])
    return GroupValues(scales), columns, rows
