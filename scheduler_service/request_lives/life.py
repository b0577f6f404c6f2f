"""What is known of one request."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_service.request_lives.life_event import (
    NO_NUMBERS,
    LifeEvent,
    LifeKind,
    Part,
    Phase,
)

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
