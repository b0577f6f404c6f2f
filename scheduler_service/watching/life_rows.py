"""Owners of the rows of an executor, so that what its steps do can be told of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.plan import NewRow, RowWork, StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import BoolArray, Int32Array, Int64Array
from scheduler_service.watching.life import Life

_NO_STAY = -1


@dataclass(slots=True)
class _Sent:
    """A step without a result.

    `firsts`: by index, lives that get a first token by it. `work`: None if no row gets more than
    one token.
    """

    firsts: dict[int, Life]
    work: RowWork | None


def _no_numbers() -> Int64Array:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class StepRows:
    """Rows of one executor. Costs nothing for rows that only decode, one token a step."""

    _owners: dict[int, Life] = field(default_factory=dict)
    _row_ids: dict[Life, list[int]] = field(default_factory=dict)
    _awaiting: dict[int, Life] = field(default_factory=dict)
    # By row: whether it is in `_awaiting`.
    _is_awaiting: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    _sent: deque[_Sent] = field(default_factory=deque)
    # By row, for the current stay: its id, draft tokens that were tried, those that were accepted,
    # and tokens beside the one that each step brings.
    _stay_ids: Int64Array = field(default_factory=_no_numbers)
    _num_drafts: Int64Array = field(default_factory=_no_numbers)
    _num_accepted: Int64Array = field(default_factory=_no_numbers)
    _num_more: Int64Array = field(default_factory=_no_numbers)

    def sent(self, plan: StepPlan, life_of: Callable[[str], Life | None]) -> None:
        """Takes note of a step that was sent. `life_of`: the life of a request, by its id."""
        for row in plan.new_rows:
            self._take_row(row, life_of(row.sequence.request.request_id))
        firsts = self._prompts(plan.work) if self._awaiting else {}
        has_more = plan.work.num_more_tokens is not None
        if has_more:
            self._see_stays(plan.work)
        self._sent.append(_Sent(firsts, plan.work if has_more else None))

    def answered(self, outcome: StepOutcome) -> Iterator[Life]:
        """Takes note of the result of the oldest step; yields lives that got an awaited token."""
        if not self._sent:
            return
        sent = self._sent.popleft()
        if outcome.status is not StepStatus.OK or not (sent.firsts or sent.work):
            return
        counts = outcome.counts
        if sent.work is not None:
            self._count_more(sent.work, counts)
        for index, life in sent.firsts.items():
            if counts[index] and life.awaits_token:
                life.awaits_token = False
                yield life

    def settle(self, life: Life) -> None:
        """Adds to a life what was counted of its rows."""
        for row_id in self._row_ids.get(life, ()):
            self._settle_row(row_id)

    def forget(self, life: Life) -> None:
        """Takes note that a life has no row here any more."""
        for row_id in self._row_ids.pop(life, ()):
            self._settle_row(row_id)
            del self._owners[row_id]
            self._await_no_more(row_id)

    def _take_row(self, row: NewRow, life: Life | None) -> None:
        row_id = row.row_id
        self._settle_row(row_id)
        self._await_no_more(row_id)
        before = self._owners.pop(row_id, None)
        if before is not None:
            of_before = self._row_ids[before]
            of_before.remove(row_id)
            if not of_before:
                del self._row_ids[before]
        if life is None:
            return
        self._owners[row_id] = life
        self._row_ids.setdefault(life, []).append(row_id)
        if life.awaits_token:
            self._await(row_id, life)

    def _await(self, row_id: int, life: Life) -> None:
        if row_id >= len(self._is_awaiting):
            num_more = row_id + 1 - len(self._is_awaiting)
            self._is_awaiting = np.append(self._is_awaiting, np.zeros(num_more, np.bool_))
        self._awaiting[row_id] = life
        self._is_awaiting[row_id] = True

    def _await_no_more(self, row_id: int) -> None:
        if self._awaiting.pop(row_id, None) is not None:
            self._is_awaiting[row_id] = False

    def _prompts(self, work: RowWork) -> dict[int, Life]:
        """Counts chunks of lives that await a token; returns by index those that get it."""
        found: dict[int, Life] = {}
        is_awaiting = self._is_awaiting.take(work.row_ids, mode="clip")
        for index in is_awaiting.nonzero()[0].tolist():
            row_id = int(work.row_ids[index])
            life = self._awaiting.get(row_id)
            if life is None:
                continue  # `clip` found it beyond the end of the array
            life.num_chunks += 1
            life.num_prompt_tokens += int(work.num_new_tokens[index])
            if work.samples is None or work.samples[index]:
                found[index] = life
                self._await_no_more(row_id)
        return found

    # -- drafts, and running on ----------------------------------------------------------------

    def _see_stays(self, work: RowWork) -> None:
        most = int(work.row_ids.max()) + 1 if len(work.row_ids) else 0
        if most > len(self._stay_ids):
            num_more = most - len(self._stay_ids)
            self._stay_ids = np.append(self._stay_ids, np.full(num_more, _NO_STAY))
            none = np.zeros(num_more, np.int64)
            self._num_drafts = np.append(self._num_drafts, none)
            self._num_accepted = np.append(self._num_accepted, none)
            self._num_more = np.append(self._num_more, none)
        others = self._stay_ids[work.row_ids] != work.stay_ids
        for row_id in work.row_ids[others].tolist():
            self._clear(row_id)
        self._stay_ids[work.row_ids] = work.stay_ids

    def _count_more(self, work: RowWork, counts: Int32Array) -> None:
        is_same = self._stay_ids[work.row_ids] == work.stay_ids
        row_ids = work.row_ids[is_same]
        num_more = np.maximum(counts[is_same] - 1, 0)
        self._num_more[row_ids] += num_more
        if work.drafts is not None:
            num_drafts = work.drafts.counts[is_same]
            self._num_drafts[row_ids] += num_drafts
            # A row runs on only after drafts that were all accepted.
            self._num_accepted[row_ids] += np.minimum(num_more, num_drafts)

    def _settle_row(self, row_id: int) -> None:
        owner = self._owners.get(row_id)
        if owner is not None and row_id < len(self._stay_ids):
            owner.num_drafts += int(self._num_drafts[row_id])
            owner.num_accepted += int(self._num_accepted[row_id])
            owner.num_more_tokens += int(self._num_more[row_id])
            self._clear(row_id)

    def _clear(self, row_id: int) -> None:
        for counted in (self._num_drafts, self._num_accepted, self._num_more):
            counted[row_id] = 0
