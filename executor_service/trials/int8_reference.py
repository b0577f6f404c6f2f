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

_NUM_STEPS = 127
_ROWS_AT_A_TIME = 4096


# Weights of 16 bits often lie just between two steps, where the last bit of a product decides.
NUDGES = (1 - 2.0**-20, 1 + 2.0**-20)


def can_be_packed(module: nn.Module) -> bool:
    """Whether `module` is a matrix that native kernels take; subclasses compute something else."""
    return (
        type(module) is nn.Linear and module.weight.dtype in DTYPES and module.in_features % 2 == 0
    )


@contextmanager
def rounded_matrices(model: nn.Module, nudge: float = 1.0) -> Iterator[None]:
    """Inside, the matrices of `model` multiply with what `pack` makes of their weights.

    Weights and sums are float32; results have the dtype of what was multiplied. A part of one
    matrix at a time is rounded. `nudge`: a number of about 1 that weights are multiplied with
    before they are rounded, to see what those do that lie between two steps.
    """
    matrices: list[Any] = [module for module in model.modules() if can_be_packed(module)]
    for matrix in matrices:
        matrix.forward = partial(_multiply_rounded, matrix, nudge)
    try:
        yield
    finally:
        for matrix in matrices:
            del matrix.forward  # the method of the class is seen again


def _multiply_rounded(matrix: nn.Linear, nudge: float, rows: Tensor) -> Tensor:
    parts = torch.split(matrix.weight.detach(), _ROWS_AT_A_TIME)
    inputs = rows.float()
    sums = torch.cat([functional.linear(inputs, _rounded(part, nudge)) for part in parts], dim=-1)
    if matrix.bias is not None:
        sums += matrix.bias.detach().float()
    return sums.to(rows.dtype)


def _rounded(weight: Tensor, nudge: float) -> Tensor:
    """What 127 steps to either side of 0 make of `weight` [N, K], float32."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1, keepdim=True)
    factor = torch.where(largest > 0, _NUM_STEPS / largest, 1.0)
    return torch.round(weight * (factor * nudge)) * (largest / _NUM_STEPS)
