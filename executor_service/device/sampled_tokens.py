"""Sampled tokens that stay on the device, for steps that begin before the host has them.

What is written and read here is asked of the compute stream, so it is done in the order of the
steps, and nobody waits. Which token is whose the host knows: only tokens are on the device.

Shape letters: S rows that sample, A rows whose input token is awaited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.steps.step import Int32Array, Int64Array, StepInput


@dataclass(frozen=True, slots=True)
class _Kept:
    """`tokens`: [S] int64 on the device, or one if no row samples. `places`: whose, by row id."""

    tokens: Tensor
    places: Int64Array


class SampledTokens:
    """A token for each row id of each step that is kept."""

    def __init__(self) -> None:
        self._of_steps: dict[int, _Kept] = {}

    def keep(self, step: StepInput, rows: Int64Array, token_ids: Tensor) -> None:
        """`token_ids` [S] int32 are what `rows` [S] of `step` sample, -1 for none.

        They are copied: what steps draw in a recording lies where the next one draws. Whatever has
        none gets some token of the vocabulary.
        """
        places = np.zeros(int(step.row_ids.max()) + 1, np.int64)
        places[step.row_ids[rows]] = np.arange(len(rows))
        tokens = token_ids.clamp(min=0) if len(rows) else token_ids.new_zeros(1)
        self._of_steps[step.step_id] = _Kept(tokens.to(torch.int64), places)

    def forget(self, step_id: int) -> None:
        """Gives its memory back, if it was kept."""
        self._of_steps.pop(step_id, None)

    def find(self, step_ids: Int64Array, row_ids: Int32Array) -> tuple[Tensor, Int64Array]:
        """What each of `row_ids` [A] sampled in the step beside it [A].

        Returns tokens, int64 on the device, and which of these it is: [A] int64. All of these
        steps are kept.
        """
        distinct, which = np.unique(step_ids, return_inverse=True)
        kept = [self._of_steps[step_id] for step_id in distinct.tolist()]
        if len(kept) == 1:
            return kept[0].tokens, kept[0].places[row_ids]
        starts = np.cumsum([0, *(len(each.tokens) for each in kept[:-1])])
        places = np.empty(len(row_ids), np.int64)
        for index, each in enumerate(kept):
            is_here = which == index
            places[is_here] = each.places[row_ids[is_here]] + starts[index]
        return torch.cat([each.tokens for each in kept]), places
