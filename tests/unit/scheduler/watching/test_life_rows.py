"""What steps do for rows is counted of the requests that have them."""

from __future__ import annotations

import numpy as np

from scheduler_service.scheduler.values.plan import (
    BlockMoves,
    Drafts,
    NewRow,
    RowWork,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrites,
)
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.watching.life import Life, StepRows

EMPTY = np.empty(0, np.int32)


class Rows:
    """StepRows, and lives by name."""

    def __init__(self, *names: str) -> None:
        self.lives = {name: Life(name, name, "", 0) for name in names}
        self.rows = StepRows()
        self._step_id = 0

    def send(
        self,
        rows: dict[int, int],
        new: dict[int, str] | None = None,
        num_new_tokens: int = 1,
        drafts: dict[int, int] | None = None,
        run_on: dict[int, int] | None = None,
        samples: bool = True,
    ) -> None:
        """A step with these rows, which have these stays."""
        self._step_id += 1
        num_rows = len(rows)
        counts = np.array([(drafts or {}).get(row, 0) for row in rows], np.int32)
        work = RowWork(
            np.array(list(rows), np.int64),
            np.array(list(rows.values()), np.int64),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, num_new_tokens, np.int32),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows * num_new_tokens, np.int32),
            None if samples else np.zeros(num_rows, np.bool_),
            None if run_on is None else np.array([run_on.get(row, 0) for row in rows], np.int32),
            None if drafts is None else Drafts(counts, np.zeros(counts.sum(), np.int32)),
        )
        new_rows = [
            NewRow(_request(name).sequence, row_id, EMPTY, EMPTY)
            for row_id, name in (new or {}).items()
        ]
        writes = TableWrites(EMPTY, EMPTY, EMPTY, EMPTY)
        plan = StepPlan(self._step_id, None, (), new_rows, writes, BlockMoves(), work)
        self.rows.sent(plan, self.lives.get)

    def answer(self, *counts: int, status: StepStatus = StepStatus.OK) -> list[str]:
        """Who got the token that it awaited; the oldest step brought rows so many tokens."""
        token_ids = np.zeros(sum(counts), np.int32)
        outcome = StepOutcome(1, status, token_ids, token_counts=np.array(counts, np.int32))
        return [life.key for life in self.rows.answered(outcome)]


def _request(name: str) -> Request:
    return Request.create(name, [1], SamplingParams(), arrival=1, seed=1)


def test_first_token_is_of_the_step_that_samples_when_a_prompt_takes_several() -> None:
    rows = Rows("a", "b")
    rows.lives["a"].awaits_token = True
    rows.send({0: 7, 1: 8}, {0: "a", 1: "b"}, num_new_tokens=16, samples=False)
    rows.send({0: 7, 1: 8}, num_new_tokens=3)
    rows.send({0: 7, 1: 8})

    assert [rows.answer(0, 0), rows.answer(1, 1), rows.answer(1, 1)] == [[], ["a"], []]
    life = rows.lives["a"]
    assert (life.num_chunks, life.num_prompt_tokens) == (2, 19)
    assert rows.lives["b"].num_chunks == 0


def test_nobody_has_a_first_token_when_its_step_failed_or_it_has_left_the_row() -> None:
    rows = Rows("a", "b")
    rows.lives["a"].awaits_token = True
    rows.send({0: 7}, {0: "a"})
    assert rows.answer(status=StepStatus.FAILED) == []

    rows.send({0: 8}, {0: "a"})
    rows.rows.forget(rows.lives["a"])
    rows.send({0: 9}, {0: "b"})

    assert rows.answer(1) == ["a"]  # it was under way
    assert rows.answer(1) == []


def test_drafts_and_more_tokens_are_those_of_the_stay_that_had_them() -> None:
    rows = Rows("a", "b")
    rows.send({0: 7, 2: 9}, {0: "a", 2: "b"}, drafts={0: 3, 2: 1})
    rows.send({0: 7, 2: 9}, drafts={0: 2})
    rows.answer(4, 1)
    rows.send({2: 10}, {2: "b"}, drafts={2: 5})  # another stay, of the same request
    rows.answer(2, 3)
    rows.answer(2)
    for life in rows.lives.values():
        rows.rows.settle(life)
        rows.rows.settle(life)

    counted = {k: (each.num_drafts, each.num_more_tokens) for k, each in rows.lives.items()}
    assert counted == {"a": (5, 4), "b": (6, 1)}
    assert {k: each.num_accepted for k, each in rows.lives.items()} == {"a": 4, "b": 1}


def test_tokens_beyond_the_guesses_are_those_of_running_on() -> None:
    rows = Rows("a", "b")
    rows.send({0: 7, 2: 9}, {0: "a", 2: "b"}, drafts={0: 2}, run_on={0: 3, 2: 3})
    rows.answer(5, 4)
    for life in rows.lives.values():
        rows.rows.settle(life)

    counted = {k: (each.num_more_tokens, each.num_accepted) for k, each in rows.lives.items()}
    assert counted == {"a": (4, 2), "b": (3, 0)}
