"""What happened to one request, and the parts of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

NO_NUMBERS: Mapping[str, int] = MappingProxyType({})


class LifeKind(Enum):
    """What happened.

    In this order, if nothing is in the way: RECEIVED, GIVEN (to an executor, which has not begun
    it), BEGAN, FIRST_TOKEN, ENDED. WAITS: for another reason than before. PREEMPTED gave up its KV,
    SWAPPED_OUT has it in the host pool. KV_LOST: a step failed that it leaned on. TAKEN_BACK: from
    an executor that is there, EXECUTOR_LOST: from one that is not. QUARANTINED: executors may have
    died of it, and it is tried alone from now on; ACQUITTED: it no longer is. RESUMED: the first
    token since.
    """

    REFUSED = "refused"
    RECEIVED = "received"
    WAITS = "waits"
    GIVEN = "given"
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
    """`executor`: its address, empty where it is about none. `reason`: a constant name, or empty.

    `numbers`: by name, as `LifeRecorder` says them. `detail`: of a refusal, or an end by an error,
    what its client was told.
    """

    at_ns: int
    kind: LifeKind
    executor: str = ""
    reason: str = ""
    numbers: Mapping[str, int] = field(default_factory=lambda: NO_NUMBERS)
    detail: str = ""


class Phase(Enum):
    """Where a request is. QUEUED: no executor has it; GIVEN: one has, and did not begin it.

    PROMPT and TOKENS are computed; PROMPT also where tokens that were known are computed again.
    RECOVERING: an executor was lost or left that had begun it, and no other has begun it yet.
    """

    QUEUED = "queued"
    GIVEN = "given"
    PROMPT = "prompt"
    TOKENS = "tokens"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    RECOVERING = "recovering"


class Part(NamedTuple):
    """A part of a request's time: where it was, why it did not go on, and at which executor."""

    phase: Phase
    reason: str = ""
    executor: str = ""


# So many events of a request are kept: the first ones, and the latest.
MAX_EVENTS = 64
_NUM_FIRST = 16
# Parts of its time that are told apart.
_MAX_PARTS = 32
_MAX_DETAIL_CHARS = 300


class Life:
    """From when a request came, or was refused. Only `LifeRecorder` changes it.

    `key`: as the cluster and its cores name it; `request_id`: as its client does; `client_key`:
    with its tokens, 0 if it was refused. `events`, of which `num_left_out` in the middle are not
    kept. `executor`: who has it, or had it last.
    `num_chunks` and `num_prompt_tokens`: steps that computed known tokens of it, and how many.
    `num_drafts`: guesses of its tokens that were tried; `num_more_tokens`: how many it got
    beside the one that any step brings, `num_accepted` of them as they were guessed, the others
    because its executor ran on. `num_output_tokens`: once it has ended.
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
        self._parts: dict[Part, int] = {}
        self._part = Part(Phase.QUEUED)
        self._since_ns = now_ns
        # Why it waited, since something else happened than that.
        self._reasons: set[tuple[str, str]] = set()

    @property
    def part(self) -> Part:
        """The one that it is in, or ended in."""
        return self._part

    @property
    def since_ns(self) -> int:
        """When that began."""
        return self._since_ns

    def parts(self, now_ns: int) -> dict[Part, int]:
        """How long it was in each until now, in nanoseconds."""
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
        """Something has happened at its executor, if it has one."""
        if kind is not LifeKind.WAITS:
            self._reasons.clear()
        if len(detail) > _MAX_DETAIL_CHARS:
            detail = f"{detail[:_MAX_DETAIL_CHARS]}..."
        return self._keep(LifeEvent(now_ns, kind, self.executor, reason, numbers, detail))

    def wait(self, now_ns: int, reason: str, executor: str) -> LifeEvent | None:
        """It waits for this; the event, if that is news since something else happened."""
        if self._part[1:] == (reason, executor):
            return None
        self.enter(now_ns, self._part.phase, reason, executor)
        if (reason, executor) in self._reasons:
            return None
        self._reasons.add((reason, executor))
        return self._keep(LifeEvent(now_ns, LifeKind.WAITS, executor, reason))

    def enter(self, now_ns: int, phase: Phase, reason: str = "", executor: str = "") -> None:
        """Another part of its time begins."""
        self._close_part(now_ns)
        part = Part(phase, reason, executor)
        if part not in self._parts and len(self._parts) >= _MAX_PARTS:
            part = Part(phase)
        self._part = part

    def end(self, now_ns: int) -> None:
        """It is over."""
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
