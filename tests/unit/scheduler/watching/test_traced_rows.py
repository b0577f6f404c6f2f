"""Steps of traced requests, beside a list that is gone through row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.scheduler.values.plan import (
    BlockMoves,
    NewRow,
    RowWork,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrites,
)
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.watching.request_traces import TracedRows

NUM_ROWS = 3
COMPUTE_US = 5
EMPTY = np.empty(0, np.int32)
ROWS = st.sets(st.integers(0, NUM_ROWS - 1))


@dataclass(slots=True, eq=False)
class CountedTrace:
    """As much of a RequestTrace as a request needs that decodes."""

    num_steps: int = 0
    compute_us: int = 0
    awaits_token: bool = False

    def count_steps(self, num_steps: int, compute_us: int) -> None:
        self.num_steps += num_steps
        self.compute_us += compute_us


class Executor:
    """Rows that change hands while steps are in flight. Requests with an even key are traced."""

    def __init__(self) -> None:
        self.rows = TracedRows("executor:1")
        self.traces: dict[int, Any] = {}
        self.expected: Counter[int] = Counter()
        self._owners: dict[int, int] = {}
        self._in_flight: list[tuple[int, list[int]]] = []
        self._last_step_id = 0
        self._last_key = 0

    def send(self, new_rows: set[int], working: set[int]) -> None:
        """Gives rows to new requests, and computes those of `working` that are taken."""
        found = [self._new_row(row_id) for row_id in sorted(new_rows)]
        row_ids = sorted(row_id for row_id in working if row_id in self._owners)
        keys = [self._owners[row_id] for row_id in row_ids]
        ones = np.ones(len(row_ids), np.int32)
        stays = np.array(keys, np.int64)
        work = RowWork(np.array(row_ids, np.int64), stays, ones, ones, ones, EMPTY, None)
        writes = TableWrites(EMPTY, EMPTY, EMPTY, EMPTY)
        step_id = self._last_step_id = self._last_step_id + 1
        plan = StepPlan(step_id, step_id - 1, (), found, writes, BlockMoves(), work)
        self.rows.sent(plan, self.traces, 0)
        self._in_flight.append((step_id, keys))

    def answer(self) -> None:
        """Answers the oldest step in flight, if there is one."""
        if self._in_flight:
            step_id, keys = self._in_flight.pop(0)
            self.rows.answered(StepOutcome(step_id, StepStatus.OK, compute_us=COMPUTE_US), 0)
            self.expected.update(keys)

    def end_all(self) -> None:
        """Ends all traced requests, as long as nothing is in flight."""
        for trace in self.traces.values():
            self.rows.ended(trace)

    def _new_row(self, row_id: int) -> NewRow:
        self._last_key += 1
        key = self._last_key
        request = Request.create(f"r{key}", [1], SamplingParams(), arrival=key, seed=key)
        request.client_key = self._owners[row_id] = key
        if key % 2 == 0:
            self.traces[key] = CountedTrace()
        return NewRow(request.sequence, row_id, EMPTY, EMPTY)


@given(st.lists(st.one_of(st.none(), st.tuples(ROWS, ROWS)), max_size=30))
def test_traced_rows_count_each_step_for_its_request_when_rows_change_hands(
    happenings: list[tuple[set[int], set[int]] | None],
) -> None:
    executor = Executor()
    for happening in happenings:
        if happening is None:
            executor.answer()
        else:
            executor.send(*happening)
    for _ in happenings:
        executor.answer()
    executor.end_all()

    for key, trace in executor.traces.items():
        assert trace.num_steps == executor.expected[key]
        assert trace.compute_us == COMPUTE_US * executor.expected[key]
