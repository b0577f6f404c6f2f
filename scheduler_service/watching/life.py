"""What happened to one request, and the parts of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

NO_NUMBERS: Mapping[str, int] = MappingProxyType({})


class LifeKind(Enum):
    """Kinds of events in the life of a request.

    In this order, if nothing is in the way: RECEIVED, GIVEN (to an executor, which has not begun
    it), BEGAN, FIRST_TOKEN, ENDED. WAITS: for another reason than before. PREEMPTED: it gave up its
    KV; SWAPPED_OUT: its KV is in the host pool. KV_LOST: a step failed that it depended on.
    TAKEN_BACK: it left an executor that is still there; EXECUTOR_LOST: one that is not.
    QUARANTINED: executors may have died of it, and it is tried alone from now on; ACQUITTED: it
    runs with others again. RESUMED: the first token since.
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
    """An event in the life of a request.

    `executor`: its address, empty for none. `reason`: a constant name, or empty. `numbers`: by
    name, as `LifeRecorder` documents. `detail`: what the client was told of a refusal or an error.
    """

    at_ns: int
    kind: LifeKind
    executor: str = ""
    reason: str = ""
    numbers: Mapping[str, int] = field(default_factory=lambda: NO_NUMBERS)
    detail: str = ""


class Phase(Enum):
    """States of a request. QUEUED: no executor has it; GIVEN: one has, and did not begin it.

    PROMPT: its known tokens are computed, for the first time or again. TOKENS: it decodes.
    RECOVERING: an executor that had begun it is gone, and no other one has begun it yet.
    """

    QUEUED = "queued"
    GIVEN = "given"
    PROMPT = "prompt"
    TOKENS = "tokens"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    RECOVERING = "recovering"


class Part(NamedTuple):
    """Part of the time of a request: its phase, why it did not go on, and at which executor."""

    phase: Phase
    reason: str = ""
    executor: str = ""


# Events of a request that are kept: the first ones, and the latest.
MAX_EVENTS = 64
_NUM_FIRST = 16
# Parts of its time that are kept apart.
_MAX_PARTS = 32
_MAX_DETAIL_CHARS = 300


class Life:
    """Life of one request, from its arrival or refusal. Only `LifeRecorder` changes it.

    `key`: id inside the scheduler; `request_id`: the client's own; `client_key`: key of its tokens,
    0 if it was refused. `events`: without `num_left_out` in the middle. `executor`: the one that
    has it, or had it last. `num_chunks`, `num_prompt_tokens`: steps that computed known tokens of
    it, and these tokens. `num_drafts`: draft tokens that were tried. `num_more_tokens`: tokens
    beside the one that each step brings; `num_accepted` of them are accepted drafts, the others
    come from running on. `num_output_tokens`: set when it has ended.
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
        # Reasons for waiting since the last event of another kind.
        self._reasons: set[tuple[str, str]] = set()

    @property
    def part(self) -> Part:
        """The current part of its time; the last one after its end."""
        return self._part

    @property
    def since_ns(self) -> int:
        """Start of the current part."""
        return self._since_ns

    def parts(self, now_ns: int) -> dict[Part, int]:
        """Returns the time spent in each part until now, in nanoseconds."""
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
        """Records an event at its executor, if it has one."""
        if kind is not LifeKind.WAITS:
            self._reasons.clear()
        if len(detail) > _MAX_DETAIL_CHARS:
            detail = f"{detail[:_MAX_DETAIL_CHARS]}..."
        return self._keep(LifeEvent(now_ns, kind, self.executor, reason, numbers, detail))

    def wait(self, now_ns: int, reason: str, executor: str) -> LifeEvent | None:
        """Records what it waits for; returns the event, or None if that is no news.

        The same reason is no news until something else has happened.
        """
        if self._part[1:] == (reason, executor):
            return None
        self.enter(now_ns, self._part.phase, reason, executor)
        if (reason, executor) in self._reasons:
            return None
        self._reasons.add((reason, executor))
        return self._keep(LifeEvent(now_ns, LifeKind.WAITS, executor, reason))

    def enter(self, now_ns: int, phase: Phase, reason: str = "", executor: str = "") -> None:
        """Begins another part of its time."""
        self._close_part(now_ns)
        part = Part(phase, reason, executor)
        if part not in self._parts and len(self._parts) >= _MAX_PARTS:
            part = Part(phase)
        self._part = part

    def end(self, now_ns: int) -> None:
        """Ends its time."""
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
