"""Matrices with the same input as one, so that one product does for all.

Shape letter: T input tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from splitserve_kernels.decoder_weights import LinearWeights


def joined(*parts: LinearWeights) -> LinearWeights:
    """Matrices with the same input as one, outputs one after the other; a single one as it is."""
    weights = [part.weight.detach() for part in parts]
    if len(parts) == 1:
        bias = parts[0].bias
        return LinearWeights(weights[0], None if bias is None else bias.detach())
    biases = None
    if any(part.bias is not None for part in parts):
        biases = torch.cat([_bias(part) for part in parts])
    return LinearWeights(torch.cat(weights), biases)


def _bias(part: LinearWeights) -> Tensor:
    """[outputs]."""
    return part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach()


def apply(linear: LinearWeights, numbers: Tensor) -> Tensor:
    """`numbers`: [T, inputs]. Returns [T, outputs]."""
    return functional.linear(numbers, linear.weight, linear.bias)
