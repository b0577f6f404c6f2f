"""Life of one request: its events, its phases with their durations, and the rows that it had.

`Life` and its values come first. `StepRows` follows: it knows the owners of an executor's rows, so
that counts of a step can be added to the lives of its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from scheduler_service.scheduler.values import (
    BoolArray,
    Int32Array,
    Int64Array,
    NewRow,
    RowWork,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
)

NO_NUMBERS: Mapping[str, int] = MappingProxyType({})


class LifeKind(Enum):
    """Kinds of events in the life of a request.

    An undisturbed request has RECEIVED, ASSIGNED (to an executor that has not begun it),
    BEGAN, FIRST_TOKEN and ENDED, in this order. WAITS: the request waits for another reason than
    before. PREEMPTED: the request gave up its KV. SWAPPED_OUT: its KV is in the host pool. KV_LOST:
    a step failed that the request depended on. TAKEN_BACK: the request left an executor that still
    serves. EXECUTOR_LOST: the request left an executor that is gone. QUARANTINED: executors may
    have died of the request, and it is tried alone from now on. ACQUITTED: it runs with other
    requests again. RESUMED: first token after the request began again.
    """

    REFUSED = "refused"
    RECEIVED = "received"
    WAITS = "waits"
    ASSIGNED = "assigned"
    BEGAN = "began"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    SWAPPED_OUT = "swapped_out"
    SWAPPED_IN = "swapped_in"
    KV_LOST = "kv_lost"
    TAKEN_BACK = "taken_back"
    EXECUTOR_LOST = "executor_lost"
    QUARANTINED = "quarantined"
    ACQUITTED = "acquitted"
    RESUMED = "resumed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """Event in the life of a request.

    `executor`: address, empty for none. `reason`: a constant name, or empty. `numbers`: by name, as
    `LifeRecorder` documents. `detail`: what the client was told of a refusal or an error.
    """

    at_ns: int
    kind: LifeKind
    executor: str = ""
    reason: str = ""
    numbers: Mapping[str, int] = field(default_factory=lambda: NO_NUMBERS)
    detail: str = ""


class RequestPhase(Enum):
    """States of a request.

    QUEUED: no executor has the request. ASSIGNED: an executor has it and has not begun it. PROMPT:
    its known tokens are computed, for the first time or again. TOKENS: it decodes. PREEMPTED: it
    gave up its KV. SWAPPED: its KV is in the host pool. RECOVERING: its KV was lost after it had
    begun, and no executor has begun it again.
    """

    QUEUED = "queued"
    ASSIGNED = "assigned"
    PROMPT = "prompt"
    TOKENS = "tokens"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    RECOVERING = "recovering"


class PhaseSpan(NamedTuple):
    """Part of the time of a request: phase, reason for not going on, and executor address."""

    phase: RequestPhase
    reason: str = ""
    executor: str = ""


# Number of events kept for a request. Beyond it, the first _NUM_FIRST and the latest are kept.
MAX_EVENTS = 64
_NUM_FIRST = 16
# Number of parts of a life that are kept apart; further parts are counted by their phase alone.
_MAX_PARTS = 32
_MAX_DETAIL_CHARS = 300


class Life:
    """Life of one request, from its arrival or refusal. Only `LifeRecorder` changes it.

    `key`: id inside the scheduler. `request_id`: the client's own id. `client_key`: key of its
    tokens, 0 if the request was refused. `events`: all but `num_left_out` from the middle.
    `executor`: address of the current executor, or of the last one. `num_chunks`,
    `num_prompt_tokens`: steps that computed known tokens of the request, and the number of these
    tokens. `num_drafts`: draft tokens that were tried. `num_more_tokens`: output tokens beyond one
    per step. Of these, `num_accepted` are accepted draft tokens; the others come from running on.
    `num_output_tokens`: set when the request has ended.
    """

    __slots__ = (
        "_part",
        "_parts",
        "_reasons",
        "_since_ns",
        "awaits_token",
        "client_key",
        "ended_ns",
        "events",
        "executor",
        "has_begun",
        "has_token",
        "key",
        "num_accepted",
        "num_chunks",
        "num_drafts",
        "num_left_out",
        "num_more_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "request_id",
        "tenant",
    )

    def __init__(self, key: str, request_id: str, tenant: str, now_ns: int) -> None:
        self.key = key
        self.request_id = request_id
        self.tenant = tenant
        self.client_key = 0
        self.events: list[LifeEvent] = []
        self.num_left_out = 0
        self.executor = ""
        self.ended_ns: int | None = None
        self.has_begun = False
        self.has_token = False
        self.awaits_token = False
        self.num_chunks = 0
        self.num_prompt_tokens = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_more_tokens = 0
        self.num_output_tokens = 0
        self._parts: dict[PhaseSpan, int] = {}
        self._part = PhaseSpan(RequestPhase.QUEUED)
        self._since_ns = now_ns
        # (reason, executor) of each WAITS event since the last event of another kind.
        self._reasons: set[tuple[str, str]] = set()

    @property
    def part(self) -> PhaseSpan:
        """Current part of the life; the last part once the request has ended."""
        return self._part

    @property
    def since_ns(self) -> int:
        """Start of the current part, in nanoseconds by the clock of events."""
        return self._since_ns

    def parts(self, now_ns: int) -> dict[PhaseSpan, int]:
        """Returns the time spent in each part until `now_ns`, in nanoseconds."""
        parts = dict(self._parts)
        if self.ended_ns is None:
            parts[self._part] = parts.get(self._part, 0) + now_ns - self._since_ns
        return parts

    def add(
        self,
        now_ns: int,
        kind: LifeKind,
        reason: str = "",
        numbers: Mapping[str, int] = NO_NUMBERS,
        detail: str = "",
    ) -> LifeEvent:
        """Records an event at the current executor, if there is one. Long details are cut."""
        if kind is not LifeKind.WAITS:
            self._reasons.clear()
        if len(detail) > _MAX_DETAIL_CHARS:
            detail = f"{detail[:_MAX_DETAIL_CHARS]}..."
        return self._keep(LifeEvent(now_ns, kind, self.executor, reason, numbers, detail))

    def wait(self, now_ns: int, reason: str, executor: str) -> LifeEvent | None:
        """Records what the request waits for. Returns the event; None if the reason is not new.

        A reason is new once for each executor, until an event of another kind happens.
        """
        if self._part[1:] == (reason, executor):
            return None
        self.enter(now_ns, self._part.phase, reason, executor)
        if (reason, executor) in self._reasons:
            return None
        self._reasons.add((reason, executor))
        return self._keep(LifeEvent(now_ns, LifeKind.WAITS, executor, reason))

    def enter(self, now_ns: int, phase: RequestPhase, reason: str = "", executor: str = "") -> None:
        """Ends the current part and begins another one."""
        self._close_part(now_ns)
        part = PhaseSpan(phase, reason, executor)
        if part not in self._parts and len(self._parts) >= _MAX_PARTS:
            part = PhaseSpan(phase)
        self._part = part

    def end(self, now_ns: int) -> None:
        """Ends the current part and the life."""
        self._close_part(now_ns)
        self.ended_ns = now_ns

    def _close_part(self, now_ns: int) -> None:
        if now_ns > self._since_ns:
            self._parts[self._part] = self._parts.get(self._part, 0) + now_ns - self._since_ns
        self._since_ns = now_ns

    def _keep(self, event: LifeEvent) -> LifeEvent:
        if len(self.events) >= MAX_EVENTS:
            del self.events[_NUM_FIRST]
            self.num_left_out += 1
        self.events.append(event)
        return event


# -- Owners of the rows of an executor -------------------------------------------------------------

_NO_STAY = -1


@dataclass(slots=True)
class _Sent:
    """Step that was sent and has no result yet.

    `firsts`: lives that get an awaited token by the step, by index of the row in the step. `work`:
    None if no row gets more than one token. `counts`: [R], tokens of each row in parts of the
    result; None without parts.
    """

    step_id: int
    firsts: dict[int, Life]
    work: RowWork | None
    counts: Int32Array | None = None


def _no_numbers() -> Int64Array:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class StepRows:
    """Rows of one executor and the lives that own them, with the counts of each row.

    Rows that decode one token per step cost nothing here.
    """

    _owners: dict[int, Life] = field(default_factory=dict)
    _row_ids: dict[Life, list[int]] = field(default_factory=dict)
    _awaiting: dict[int, Life] = field(default_factory=dict)
    # By row id: True if the row is in `_awaiting`.
    _is_awaiting: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    _sent: deque[_Sent] = field(default_factory=deque)
    # By row id, for the current stay: its id, draft tokens tried, draft tokens accepted, and output
    # tokens beyond one per step.
    _stay_ids: Int64Array = field(default_factory=_no_numbers)
    _num_drafts: Int64Array = field(default_factory=_no_numbers)
    _num_accepted: Int64Array = field(default_factory=_no_numbers)
    _num_more: Int64Array = field(default_factory=_no_numbers)

    def sent(self, plan: StepPlan, life_of: Callable[[str], Life | None]) -> None:
        """Notes a step that was sent. `life_of`: returns the life of a request id, or None."""
        for row in plan.new_rows:
            self._take_row(row, life_of(row.sequence.request.request_id))
        firsts = self._prompts(plan.work) if self._awaiting else {}
        has_more = plan.work.num_more_tokens is not None
        if has_more:
            self._see_stays(plan.work)
        self._sent.append(_Sent(plan.step_id, firsts, plan.work if has_more else None))

    def progressed(self, part: StepPart) -> Iterator[Life]:
        """Notes a part of the result of the oldest open step; yields lives as `answered` does."""
        if self._sent and self._sent[0].step_id == part.step_id:
            before = self._sent[0].counts
            counts = part.counts if before is None else before + part.counts
            yield from self._take_counts(self._sent[0], counts)

    def answered(self, outcome: StepOutcome) -> Iterator[Life]:
        """Notes the result of the oldest open step; yields the lives that got an awaited token."""
        if not self._sent:
            return
        sent = self._sent.popleft()
        if outcome.status is not StepStatus.OK or not (sent.firsts or sent.work):
            return
        yield from self._take_counts(sent, outcome.counts)

    def _take_counts(self, sent: _Sent, counts: Int32Array) -> Iterator[Life]:
        """Notes that rows of a step have `counts` [R] tokens by now."""
        if sent.work is not None:
            self._count_more(sent.work, sent.counts, counts)
            sent.counts = counts
        for index, life in sent.firsts.items():
            if counts[index] and life.awaits_token:
                life.awaits_token = False
                yield life

    def settle(self, life: Life) -> None:
        """Moves the counts of the rows of a life into the life."""
        for row_id in self._row_ids.get(life, ()):
            self._settle_row(row_id)

    def forget(self, life: Life) -> None:
        """Releases all rows of a life, after moving their counts into the life."""
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
        """Counts the chunks of lives that await a token.

        Returns, by index in `work`, the lives that get the token by this step.
        """
        found: dict[int, Life] = {}
        is_awaiting = self._is_awaiting.take(work.row_ids, mode="clip")
        for index in is_awaiting.nonzero()[0].tolist():
            row_id = int(work.row_ids[index])
            life = self._awaiting.get(row_id)
            if life is None:
                continue  # `clip` repeats the last element for row ids beyond the array
            life.num_chunks += 1
            life.num_prompt_tokens += int(work.num_new_tokens[index])
            if work.samples is None or work.samples[index]:
                found[index] = life
                self._await_no_more(row_id)
        return found

    # -- Draft tokens and running on -----------------------------------------------------------

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

    def _count_more(self, work: RowWork, before: Int32Array | None, counts: Int32Array) -> None:
        """Counts the tokens of rows behind the first.

        `counts`: [R], tokens of each row so far. `before`: [R], those already counted; None for
        none.
        """
        is_same = self._stay_ids[work.row_ids] == work.stay_ids
        row_ids = work.row_ids[is_same]
        num_more = np.maximum(counts[is_same] - 1, 0)
        num_before = 0 if before is None else np.maximum(before[is_same] - 1, 0)
        # A failed row has fewer tokens in the result than in its parts.
        self._num_more[row_ids] += np.maximum(num_more - num_before, 0)
        if work.drafts is not None:
            num_drafts = work.drafts.counts[is_same]
            self._num_drafts[row_ids] += num_drafts if before is None else 0
            # A row runs on only if all of its draft tokens were accepted.
            accepted = np.minimum(num_more, num_drafts) - np.minimum(num_before, num_drafts)
            self._num_accepted[row_ids] += np.maximum(accepted, 0)

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
