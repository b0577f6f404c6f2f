"""The row table, sampling parameters in columns, and the clock of epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from executor_service.steps import (
    Grammar,
    Int32Array,
    Int64Array,
    NewRows,
    ParamRows,
    RowTable,
    SamplingParams,
    StepGrammars,
    TokenConstraints,
    steady_clock,
)

MAX_INFLIGHT_STEPS = 3


def _column(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def test_sample_is_kept_while_later_steps_are_in_flight() -> None:
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


PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=5, top_p=0.25, min_p=0.5),
    SamplingParams(top_k=1000, num_logprobs=0, num_prompt_logprobs=3),
    SamplingParams(suppressed_token_ids=(2,), min_tokens=4),
    SamplingParams(logit_bias={7: 1.0}),
    SamplingParams(frequency_penalty=0.1),
    SamplingParams(bad_words_token_ids=((3,),)),
    SamplingParams(bad_words_token_ids=((3, 4),)),
    SamplingParams(grammar=Grammar("regex", ("a",))),
)


def test_columns_say_what_the_objects_say() -> None:
    rows = ParamRows.of(PARAMS)
    assert [rows[row] for row in range(len(rows))] == list(PARAMS)
    assert rows.temperatures.tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert rows.top_k(100).tolist() == [100, 5, 100, 100, 100, 100, 100, 100, 100]
    assert rows.column("top_p").tolist() == [1, 0.25, 1, 1, 1, 1, 1, 1, 1]
    assert rows.column("min_p").tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0, 0]
    assert rows.num_logprobs.tolist() == [-1, -1, 0, -1, -1, -1, -1, -1, -1]
    assert rows.num_prompt_logprobs.tolist() == [-1, -1, 3, -1, -1, -1, -1, -1, -1]
    assert rows.adjusts_logits.tolist() == [False] * 3 + [True] * 6
    # Penalties are counted where tokens are sampled, and a word of one token has none before it.
    assert rows.reads_output.tolist() == [False] * 7 + [True] * 2
    columns = (rows.temperatures, rows.top_k(9), rows.column("top_p"), rows.num_logprobs)
    # Native code reads them from end to end.
    assert all(column.flags.c_contiguous for column in columns)


def test_rows_are_taken_and_put_as_a_whole() -> None:
    table = ParamRows.empty(4)
    table.put(np.array([3, 1], np.int32), ParamRows.of(PARAMS[1:3]))
    taken = table.take(np.array([1, 3, 1]))
    assert [taken[row] for row in range(3)] == [PARAMS[2], PARAMS[1], PARAMS[2]]
    assert taken.top_k(100).tolist() == [100, 5, 100]
    table.forget(np.array([3], np.int32))
    assert table.objects[3] is None


def blocked(params: SamplingParams, vocab_size: int) -> list[int]:
    assert params.constraints is not None
    mask = params.constraints.blocked(vocab_size)
    assert mask is not None
    return [token_id for token_id in range(vocab_size) if mask[token_id]]


def test_blocked_is_all_else_when_some_tokens_are_allowed() -> None:
    params = SamplingParams(allowed_token_ids=(5, 1, 5), bad_words_token_ids=((5,), (1, 2)))
    assert blocked(params, 7) == [0, 2, 3, 4, 5, 6]
    assert blocked(SamplingParams(bad_words_token_ids=((5,), (1, 2))), 7) == [5]


def test_nothing_is_blocked_when_there_are_only_phrases() -> None:
    constraints = TokenConstraints.of((), ((1, 2),))
    assert constraints is not None
    assert constraints.blocked(7) is None


@pytest.mark.parametrize(
    ("history", "num_tokens", "forbidden"),
    [
        ([1], 1, [2]),
        ([3, 1], 2, [2, 4]),
        ([9, 3, 1], 3, [2, 4, 6]),
        # What is known beyond the position is not before it.
        ([9, 3, 1], 2, []),
        ([9, 3, 1, 1], 4, [2]),
        ([3], 1, []),
        ([], 0, []),
    ],
)
def test_phrases_forbid_their_last_token_when_the_rest_has_come(
    history: list[int], num_tokens: int, forbidden: list[int]
) -> None:
    constraints = TokenConstraints.of((), ((1, 2), (3, 1, 4), (9, 3, 1, 6), (8,)))
    assert constraints is not None
    assert constraints.forbidden_after(history, num_tokens) == forbidden


@pytest.mark.parametrize(
    ("fields", "is_adjusting", "needs_history"),
    [
        ({}, False, False),
        ({"allowed_token_ids": (1,)}, True, False),
        ({"bad_words_token_ids": ((1,),)}, True, False),
        ({"bad_words_token_ids": ((1,), (1, 2))}, True, True),
    ],
)
def test_history_is_kept_when_phrases_need_it(
    fields: Mapping[str, Any], is_adjusting: bool, needs_history: bool
) -> None:
    params = SamplingParams(**fields)
    assert params.needs_history == needs_history
    assert ParamRows.of([params]).adjusts_logits.tolist() == [is_adjusting]


HOUR = 3600 * 10**9


class Clocks:
    """Clocks of a machine, in nanoseconds."""

    wall_ns, steady_ns = 1000 * HOUR, 5 * HOUR

    def go_on(self, by_ns: int) -> None:
        self.wall_ns += by_ns
        self.steady_ns += by_ns


@pytest.mark.parametrize(("set_by", "hours"), [(-300, 1002), (300, 1302)])
def test_steady_clock_never_goes_back_when_the_wall_clock_is_set(set_by: int, hours: int) -> None:
    clocks = Clocks()
    now_ns = steady_clock(lambda: clocks.wall_ns, lambda: clocks.steady_ns)
    clocks.go_on(HOUR)
    clocks.wall_ns += set_by * HOUR
    clocks.go_on(HOUR)
    assert now_ns() == hours * HOUR
