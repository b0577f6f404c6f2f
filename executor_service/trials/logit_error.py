"""How far two models' logits are apart, and how far they may be.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Largest error (see `relative_error`) in float32 that is taken for rounding. Ordinary models of 2
# to 32 layers stay below half of it.
FLOAT32_TOLERANCE = 3e-4


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Largest error over stretches of 8 positions; of each, the median over its positions.

    `expected`, `actual`: [Q, L, V]. The error of a position is the size of the difference over the
    size of the (centred) logits. The median lets single positions differ, where rounding made a
    mixture choose another expert; what is wrong with a model is wrong at many positions. NaN if
    `actual` holds any.
    """
    errors = _errors(expected, actual)
    if not bool(torch.isfinite(errors).all()):
        return float("nan")
    return max(float(part.median()) for row in errors for part in row.split(8))


def typical_error(expected: Tensor, actual: Tensor) -> float:
    """The median error over all positions, for what does not depend on these; NaN as above.

    In 16 bits rounding often makes a mixture choose another expert, and later tokens attend to the
    one it did that for.
    """
    errors = _errors(expected, actual)
    return float(errors.median()) if bool(torch.isfinite(errors).all()) else float("nan")


def _errors(expected: Tensor, actual: Tensor) -> Tensor:
    """Of each position, [Q, L]."""
    centred = expected - expected.mean(dim=-1, keepdim=True)
    errors: Tensor = (actual - expected).norm(dim=-1) / centred.norm(dim=-1).clamp(min=1e-6)
    return errors
