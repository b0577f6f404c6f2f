"""Of whom the rows of an executor are, so that what its steps do can be told of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.plan import NewRow, RowWork, StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import Int32Array, Int64Array
from scheduler_service.request_lives.life import Life

_NO_STAYS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Sent:
    """A step without an answer: who gets a first token of it, by index, and its drafts."""

    firsts: dict[int, Life]
    work: RowWork | None


@dataclass(slots=True)
class StepRows:
    """Of one executor. Rows cost nothing but while they await a token, or guesses are tried."""

    _owners: dict[int, Life] = field(default_factory=dict)
    _awaiting: dict[int, Life] = field(default_factory=dict)
    _sent: deque[_Sent] = field(default_factory=deque)
    # By row: which stay it is, the guesses tried for it, those of them that were right, and the
    # tokens it got beside one a step.
    _stay_ids: Int64Array = field(default_factory=lambda: _NO_STAYS)
    _num_drafts: Int64Array = field(default_factory=lambda: _NO_STAYS)
    _num_accepted: Int64Array = field(default_factory=lambda: _NO_STAYS)
    _num_more: Int64Array = field(default_factory=lambda: _NO_STAYS)

    def sent(self, plan: StepPlan, life_of: Callable[[str], Life | None]) -> None:
        """A step is on its way. `life_of`: the life of a request, by its key."""
        for row in plan.new_rows:
            self._take_row(row, life_of(row.sequence.request.request_id))
        firsts = self._prompts(plan.work) if self._awaiting else {}
        has_more = plan.work.num_more_tokens is not None
        if has_more:
            self._see_stays(plan.work)
        self._sent.append(_Sent(firsts, plan.work if has_more else None))

    def answered(self, outcome: StepOutcome) -> Iterator[Life]:
        """The oldest step that was sent; who has got the token that it awaited."""
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
        """Adds to a life what is counted of its rows."""
        for row_id in [row_id for row_id, owner in self._owners.items() if owner is life]:
            self._settle_row(row_id)

    def forget(self, life: Life) -> None:
        """It has no row here any more."""
        for row_id in [row_id for row_id, owner in self._owners.items() if owner is life]:
            self._settle_row(row_id)
            del self._owners[row_id]
            self._awaiting.pop(row_id, None)

    def _take_row(self, row: NewRow, life: Life | None) -> None:
        self._settle_row(row.row_id)
        self._awaiting.pop(row.row_id, None)
        if life is None:
            self._owners.pop(row.row_id, None)
            return
        self._owners[row.row_id] = life
        if life.awaits_token:
            self._awaiting[row.row_id] = life

    def _prompts(self, work: RowWork) -> dict[int, Life]:
        """Counts chunks of those that await a token; who gets it by this step, by index."""
        found: dict[int, Life] = {}
        is_awaiting = np.isin(work.row_ids, list(self._awaiting))
        for index in np.flatnonzero(is_awaiting).tolist():
            life = self._awaiting[int(work.row_ids[index])]
            life.num_chunks += 1
            life.num_prompt_tokens += int(work.num_new_tokens[index])
            if work.samples is None or work.samples[index]:
                found[index] = life
                del self._awaiting[int(work.row_ids[index])]
        return found

    # -- guesses, and running on ---------------------------------------------------------------

    def _see_stays(self, work: RowWork) -> None:
        most = int(work.row_ids.max()) + 1 if len(work.row_ids) else 0
        if most > len(self._stay_ids):
            num_more = most - len(self._stay_ids)
            self._stay_ids = np.append(self._stay_ids, np.full(num_more, -1))
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
            # It runs on after guesses that were all right.
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
