"""What the row table knows of samples while steps are unfinished."""

from __future__ import annotations

import numpy as np

from executor_service.steps.row_table import RowTable
from executor_service.steps.step import Int32Array

MAX_INFLIGHT_STEPS = 3


def _column(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def test_sample_is_still_recorded_when_all_that_may_be_in_flight_has_begun_since() -> None:
    rows = RowTable(2, MAX_INFLIGHT_STEPS)
    rows.expect_sampled(_column(0), 1)
    # Step 3 begins before step 1 is finished, and step 5 before step 3 is.
    for step_id in (2, 3):
        rows.expect_sampled(_column(0), step_id)
    for step_id in (1, 2):
        rows.record_sampled(_column(0), step_id, _column(-1))
        rows.expect_sampled(_column(0), step_id + MAX_INFLIGHT_STEPS)
    assert rows.tokens_recorded(_column(0, 0), np.array([1, 2])).tolist() == [-1, -1]


def test_some_token_is_found_when_it_is_not_recorded_yet() -> None:
    rows = RowTable(2, MAX_INFLIGHT_STEPS)
    rows.expect_sampled(_column(1), 4)
    assert (rows.tokens_sampled(_column(1, 0), 5, _column(1, 1)) >= 0).tolist() == [True, False]
    rows.record_sampled(_column(1), 4, _column(77))
    assert rows.tokens_sampled(_column(1), 5, _column(1)).tolist() == [77]
