"""Grammars that a fake executor has not compiled yet."""

from __future__ import annotations

from collections import Counter

import numpy as np

from executor_service.steps.sampling_params import Grammar
from executor_service.steps.step import StepInput
from tests.support.fakes.fake_runner import StepFault


class SlowCompiler:
    """The `fault` of a FakeRunner in which the first `num_asks` rows for each grammar get no token.

    `num_asked`: how many rows that were.
    """

    def __init__(self, num_asks: int) -> None:
        self.num_asked = 0
        self._num_asks = num_asks
        self._asks_of = Counter[Grammar]()

    def __call__(self, step: StepInput) -> StepFault:
        waiting = []
        for row in np.flatnonzero(step.samples).tolist():
            grammar = step.sampling_params[row].grammar
            if grammar is not None and self._asks_of[grammar] < self._num_asks:
                self._asks_of[grammar] += 1
                waiting.append(int(step.row_ids[row]))
        self.num_asked += len(waiting)
        return StepFault(unsampled=waiting)
