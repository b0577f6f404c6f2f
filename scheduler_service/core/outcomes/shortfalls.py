"""A step brought fewer tokens than it might have: what was counted on is taken back.

Until the result of a step is there, rows are where they will be at most: their columns, what is
promised to sequences that have left their rows, and the plans behind the step.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import RowWork, StepPlan
from scheduler_service.core.request import Int32Array, SequenceStatus


class Shortfalls:
    """Puts right what was counted on. `in_flight`: the steps behind the one that is answered."""

    def __init__(self, placement: Placement, in_flight: deque[StepPlan]) -> None:
        self._placement = placement
        self._in_flight = in_flight

    def settle(self, work: RowWork, counts: Int32Array) -> None:
        """The rows of a step have got `counts` [R] tokens. Rows without any have been seen to."""
        num_more = work.num_more_tokens
        assert num_more is not None
        rows, has_tokens = self._placement.rows, counts > 0
        missing = num_more + 1 - counts
        is_there = (rows.stay_ids[work.row_ids] == work.stay_ids) & has_tokens
        rows.settle(work.row_ids[is_there], num_more[is_there], missing[is_there])
        is_short = has_tokens & (missing > 0)
        if not np.count_nonzero(is_short):
            return
        stays = work.stay_ids[is_short].tolist()
        missing_of = dict(zip(stays, missing[is_short].tolist(), strict=True))
        for plan in self._in_flight:
            self._move_back(plan.work, missing_of)
        for stay_id, sequence in self._placement.departures.sequences.items():
            num_missing = missing_of.get(stay_id, 0)
            sequence.num_promised -= num_missing
            if sequence.status is SequenceStatus.SWAPPED:
                sequence.num_computed -= num_missing

    def _move_back(self, work: RowWork, missing_of: dict[int, int]) -> None:
        """The rows of a plan in flight begin earlier than was thought. Mutates it."""
        each = enumerate(work.stay_ids.tolist())
        found = [(index, missing_of[stay]) for index, stay in each if stay in missing_of]
        if found:
            indexes, missing = np.array(found, np.int64).T
            work.num_computed_tokens[indexes] -= missing.astype(np.int32)
