"""The tokens of some rows of a step: one each, or several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.core.plan import StepOutcome
from scheduler_service.core.request import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class StepTokens:
    """`counts[i]` of `token_ids` are row i's, those of a row after the other; None: one each."""

    token_ids: Int32Array
    counts: Int32Array | None

    @classmethod
    def of(cls, outcome: StepOutcome) -> StepTokens:
        """Those of all rows of a step."""
        return cls(outcome.token_ids, outcome.token_counts)

    def take(self, rows: Int64Array) -> StepTokens:
        """Those of `rows`, rising indexes."""
        if self.counts is None:
            return StepTokens(self.token_ids[rows], None)
        is_taken = np.zeros(len(self.counts), np.bool_)
        is_taken[rows] = True
        return StepTokens(self.token_ids[np.repeat(is_taken, self.counts)], self.counts[rows])

    @property
    def last(self) -> Int32Array:
        """The last token of each row, of which none is without."""
        if self.counts is None:
            return self.token_ids
        return self.token_ids[np.cumsum(self.counts) - 1]
