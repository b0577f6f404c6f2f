"""What weights rounded to 8 bits compute, exactly: the truth for who multiplies with integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitserve_kernels.cpu.library import DTYPES

_LARGEST = 127


def can_be_packed(module: nn.Module) -> bool:
    """Whether `module` is a matrix that native kernels take; subclasses compute something else."""
    return (
        type(module) is nn.Linear and module.weight.dtype in DTYPES and module.in_features % 2 == 0
    )


@contextmanager
def rounded_matrices(model: nn.Module) -> Iterator[None]:
    """Inside, the matrices of `model` multiply with what `pack` makes of their weights.

    Weights and sums are float32; results have the dtype of what was multiplied. One matrix at a
    time is rounded.
    """
    matrices: list[Any] = [module for module in model.modules() if can_be_packed(module)]
    for matrix in matrices:
        matrix.forward = partial(_multiply_rounded, matrix)
    try:
        yield
    finally:
        for matrix in matrices:
            del matrix.forward  # the method of the class is seen again


def _multiply_rounded(matrix: nn.Linear, rows: Tensor) -> Tensor:
    weight = matrix.weight.detach().float()
    largest = weight.abs().amax(dim=1, keepdim=True)
    # An output without weights has no scale.
    factor = torch.where(largest > 0, _LARGEST / largest, torch.zeros_like(largest))
    rounded = torch.round(weight * factor) * (largest / _LARGEST)
    bias = None if matrix.bias is None else matrix.bias.detach().float()
    return functional.linear(rows.float(), rounded, bias).to(rows.dtype)
