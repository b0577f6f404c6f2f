"""Rows of one executor that requests with a trace have, and the steps of these rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Span

from scheduler_service.core.plan import NewRow, RowWork, StepOutcome, StepPlan
from scheduler_service.core.request import Int64Array
from scheduler_service.tracing.request_trace import AnsweredStep, RequestTrace

_NO_STAY = -1


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a step that belongs to a traced request that awaits a token."""

    trace: RequestTrace
    num_tokens: int
    phase: Span | None


@dataclass(frozen=True, slots=True)
class _SentStep:
    """A step without a result. `left`: traces whose rows in it are others' by now."""

    work: RowWork
    num_tokens: int
    sent_ns: int
    parts: list[_Part]
    left: list[RequestTrace] = field(default_factory=list)


class TracedRows:
    """Of the executor at `address`. Costs little for rows that only decode, however many."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._owners: dict[int, RequestTrace] = {}
        self._row_ids: dict[RequestTrace, list[int]] = {}
        # Rows whose next token is news.
        self._awaiting: dict[int, RequestTrace] = {}
        self._steps: dict[int, _SentStep] = {}
        # By row: the stay in it, its steps, and the time that they took.
        self._stay_ids: Int64Array = np.empty(0, np.int64)
        self._num_steps: Int64Array = np.empty(0, np.int64)
        self._compute_us: Int64Array = np.empty(0, np.int64)

    def sent(
        self, plan: StepPlan, trace_of: Callable[[int], RequestTrace | None], now_ns: int
    ) -> None:
        """Takes note of a step that was sent. `trace_of`: the trace of a request, by client key."""
        for row in plan.new_rows:
            self._take_row(row, trace_of(row.sequence.request.client_key))
        if not self._owners:
            return
        work = plan.work
        self._see_stays(work)
        parts = [
            _Part(trace, int(work.num_new_tokens[index]), trace.phase_span)
            for index, trace in self._find_awaiting(work)
        ]
        self._steps[plan.step_id] = _SentStep(work, plan.num_tokens, now_ns, parts)

    def answered(self, outcome: StepOutcome, now_ns: int) -> None:
        """Takes note of the result of a step."""
        sent = self._steps.pop(outcome.step_id, None)
        if sent is None:
            return
        work, compute_us = sent.work, outcome.compute_us
        row_ids = work.row_ids[self._stay_ids[work.row_ids] == work.stay_ids]
        self._num_steps[row_ids] += 1
        self._compute_us[row_ids] += compute_us
        for trace in sent.left:
            trace.count_steps(1, compute_us)
        if not sent.parts:
            return
        answered = AnsweredStep(
            outcome.step_id,
            self._address,
            len(work.row_ids),
            sent.num_tokens,
            sent.sent_ns,
            now_ns,
            outcome.status.value,
            outcome.move_us,
            compute_us,
        )
        for part in sent.parts:
            part.trace.step(answered, part.num_tokens, part.phase)

    def ended(self, trace: RequestTrace) -> None:
        """Adds to a trace what was counted of its rows, and forgets it."""
        for row_id in self._row_ids.pop(trace, ()):
            self._settle(row_id, trace)
            del self._owners[row_id]
            self._awaiting.pop(row_id, None)
        if not self._owners:
            self._steps.clear()

    def close(self) -> None:
        """Adds to all traces what was counted of their rows: the executor is gone."""
        for row_id, trace in self._owners.items():
            self._settle(row_id, trace)

    def _take_row(self, row: NewRow, trace: RequestTrace | None) -> None:
        row_id = row.row_id
        before = self._owners.pop(row_id, None)
        if before is not None:
            self._leave(row_id, before)
        if trace is None:
            return
        self._owners[row_id] = trace
        self._row_ids.setdefault(trace, []).append(row_id)
        if trace.awaits_token:
            self._awaiting[row_id] = trace

    def _leave(self, row_id: int, trace: RequestTrace) -> None:
        """Takes a row from a trace, of which steps may be in flight."""
        self._settle(row_id, trace)
        self._awaiting.pop(row_id, None)
        row_ids = self._row_ids[trace]
        row_ids.remove(row_id)
        if not row_ids:
            del self._row_ids[trace]
        if row_id < len(self._stay_ids):
            stay_id, self._stay_ids[row_id] = int(self._stay_ids[row_id]), _NO_STAY
            for step in self._steps.values():
                if stay_id in step.work.stay_ids:
                    step.left.append(trace)

    def _settle(self, row_id: int, trace: RequestTrace) -> None:
        if row_id < len(self._num_steps):
            trace.count_steps(int(self._num_steps[row_id]), int(self._compute_us[row_id]))
            self._num_steps[row_id] = self._compute_us[row_id] = 0

    def _find_awaiting(self, work: RowWork) -> list[tuple[int, RequestTrace]]:
        """Returns the rows of a step whose traces await a token, by index."""
        found = []
        for row_id, trace in list(self._awaiting.items()):
            if not trace.awaits_token:
                del self._awaiting[row_id]
                continue
            (indexes,) = (work.row_ids == row_id).nonzero()
            if len(indexes):
                found.append((int(indexes[0]), trace))
        return found

    def _see_stays(self, work: RowWork) -> None:
        most = int(work.row_ids.max()) + 1 if len(work.row_ids) else 0
        num_more = most - len(self._stay_ids)
        if num_more > 0:
            none = np.zeros(num_more, np.int64)
            self._stay_ids = np.append(self._stay_ids, np.full(num_more, _NO_STAY))
            self._num_steps = np.append(self._num_steps, none)
            self._compute_us = np.append(self._compute_us, none)
        changed = (self._stay_ids[work.row_ids] != work.stay_ids).nonzero()[0]
        if len(changed):
            row_ids = work.row_ids[changed]
            self._num_steps[row_ids] = self._compute_us[row_ids] = 0
            self._stay_ids[row_ids] = work.stay_ids[changed]
