"""What the row table knows of samples while steps are unfinished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from executor_service.steps.batch import NewRows
from executor_service.steps.row_table import RowTable
from executor_service.steps.sampling_params import Grammar, SamplingParams, StepGrammars
from executor_service.steps.step import Int32Array, Int64Array

MAX_INFLIGHT_STEPS = 3


def _column(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def test_sample_is_still_recorded_when_all_that_may_be_in_flight_has_begun_since() -> None:
    rows = RowTable(2, MAX_INFLIGHT_STEPS)
    rows.sampled.expect(_column(0), 1, _column(5))
    # Step 3 begins before step 1 is finished, and step 5 before step 3 is.
    for step_id in (2, 3):
        rows.sampled.expect(_column(0), step_id, _column(5))
    for step_id in (1, 2):
        rows.record_sampled(_column(0), step_id, _column(-1))
        rows.sampled.expect(_column(0), step_id + MAX_INFLIGHT_STEPS, _column(5))
    assert rows.sampled.tokens_recorded(_column(0, 0), np.array([1, 2])).tolist() == [-1, -1]


def test_some_token_is_found_when_it_is_not_recorded_yet() -> None:
    rows = RowTable(2, MAX_INFLIGHT_STEPS)
    rows.sampled.expect(_column(1), 4, _column(5))
    assert (rows.sampled.tokens(_column(1, 0), 5, _column(1, 1)) >= 0).tolist() == [True, False]
    rows.record_sampled(_column(1), 4, _column(77))
    assert rows.sampled.tokens(_column(1), 5, _column(1)).tolist() == [77]


@dataclass(slots=True)
class RecordedGrammars:
    """What is asked of it; `rows`: the row ids of those that are there."""

    rows: dict[int, tuple[Grammar, Sequence[int], int]] = field(default_factory=dict)

    def add(
        self, row_id: int, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int
    ) -> None:
        self.rows[row_id] = (grammar, history, num_prompt_tokens)

    def remove(self, row_ids: Int32Array) -> None:
        for row_id in row_ids.tolist():
            self.rows.pop(row_id, None)

    def of_step(self, rows: Int64Array, row_ids: Int32Array) -> StepGrammars:
        assert set(row_ids.tolist()) <= self.rows.keys()
        return cast(StepGrammars, list(zip(rows.tolist(), row_ids.tolist(), strict=True)))


def test_grammars_come_and_go_with_their_rows() -> None:
    grammars, grammar = RecordedGrammars(), Grammar("regex", ("a",))
    table = RowTable(8, MAX_INFLIGHT_STEPS, grammars)
    new = NewRows(
        row_ids=_column(2, 5, 6),
        sampling_params_indexes=_column(0, 1, 0),
        seeds=np.zeros(3, np.int64),
        num_prompt_tokens=_column(2, 2, 1),
        block_offsets=_column(0, 0, 0, 0),
        block_ids=_column(),
        history_offsets=_column(0, 3, 3, 4),
        history_token_ids=_column(7, 8, 9, 4),
        sampling_params=(SamplingParams(grammar=grammar), SamplingParams()),
    )
    table.add(new)
    assert grammars.rows == {2: (grammar, [7, 8, 9], 2), 6: (grammar, [4], 1)}
    table.sampled.expect(_column(2), 1, _column(5))
    table.record_sampled(_column(2), 1, _column(10))
    assert grammars.rows[2][1] == [7, 8, 9, 10]
    assert table.reads_output(_column(5, 6))
    assert not table.reads_output(_column(5))
    of_step: object = table.grammars(_column(5, 6, 2))
    assert of_step == [(1, 6), (2, 2)]
    assert table.grammars(_column(5)) is None
    table.remove(_column(2, 5))
    assert list(grammars.rows) == [6]
    table.clear()
    assert not grammars.rows
    assert table.grammars(_column(6)) is None
