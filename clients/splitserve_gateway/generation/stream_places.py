"""Ids of streamed events, and the place in a stream from which a client goes on (`Last-Event-ID`).

A stream advances by steps: new tokens of one choice, or its end, or the totals. The events of a
step depend only on what was read before it and on the step itself. So another gateway, which has
the same request and the same tokens, can repeat the step and leave out the events already sent.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Self

from splitserve_common import log_context
from splitserve_gateway.generation.deltas import Delta, Event
from splitserve_gateway.http import ApiError, IdentifiedEvent, invalid, quoted
from splitserve_text import Draw

# The id of each event has the progress of all choices.
MAX_IDENTIFIED_CHOICES = 16
_PREFIX = "req_"


def exchange_id() -> str:
    """Returns the id of the current HTTP exchange: its x-request-id without the prefix."""
    context = log_context.get()
    if context is None or not context.request_id.startswith(_PREFIX):
        return secrets.token_hex(16)
    return context.request_id.removeprefix(_PREFIX)


@dataclass(frozen=True, slots=True)
class StreamOrigin:
    """Exchange that a stream began in: all ids and random numbers of the stream come from it."""

    exchange: str = field(default_factory=exchange_id)
    created_s: int = field(default_factory=lambda: int(time.time()))

    def seed(self, prompt_index: int) -> int:
        """Returns the seed for a prompt of a request without one, of 63 bits."""
        digest = hashlib.sha256(f"{self.exchange} {prompt_index}".encode()).digest()
        return int.from_bytes(digest[:8]) >> 1

    def draw(self, choice: int) -> Draw:
        """Returns a function that draws characters for the ids of a choice."""

        @cache
        def source() -> random.Random:
            return random.Random(f"{self.exchange} {choice}")  # ids, not secrets

        return lambda characters: source().choice(characters)


@dataclass(frozen=True, slots=True)
class ResumeHeaders:
    """Headers of a request that concern ids of events.

    `takes_ids`: whether events may have ids. `last_event_id`: empty for a new stream.
    """

    takes_ids: bool = True
    last_event_id: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Reads the headers of a request.

        Benchmarks such as `vllm bench serve` split streams by hand and fail at ids. They use the
        library aiohttp, so its users get ids only if they ask for events by the header Accept.
        """
        last_event_id = headers.get("last-event-id")
        is_by_hand = "aiohttp/" in headers.get("user-agent", "")
        takes_ids = (
            not is_by_hand
            or last_event_id is not None
            or "text/event-stream" in headers.get("accept", "")
        )
        return cls(takes_ids, last_event_id or "")


class Progress(NamedTuple):
    """Output of a choice: number of tokens, and whether it includes the end."""

    num_tokens: int = 0
    has_end: bool = False

    def plus(self, other: Progress) -> Progress:
        """Adds the tokens and the end of `other`."""
        return Progress(self.num_tokens + other.num_tokens, self.has_end or other.has_end)

    def __str__(self) -> str:
        return f"{self.num_tokens}{_END if self.has_end else ''}"

    def is_within(self, other: Progress) -> bool:
        """Returns whether `other` includes these tokens and this end."""
        return self.num_tokens <= other.num_tokens and (other.has_end or not self.has_end)

    @classmethod
    def of(cls, delta: Delta) -> Self:
        """Returns what `delta` adds."""
        return cls(len(delta.token_ids), delta.end is not None)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` wrote."""
        return cls(int(text.removesuffix(_END)), text.endswith(_END))


_END = "e"
_PROGRESS = rf"\d{{1,9}}{_END}?"
_ID = re.compile(
    r"(?P<exchange>[0-9a-f]{32})\.(?P<created>\d{1,12})"
    rf"\.(?P<read>{_PROGRESS}(?:_{_PROGRESS}){{0,{MAX_IDENTIFIED_CHOICES - 1}}})"
    rf"\.(?P<choice>\d{{1,2}})\.(?P<step>{_PROGRESS})\.(?P<number>\d{{1,9}})"
)


@dataclass(frozen=True, slots=True)
class EventId:
    """Id of an event. `number`: number of the event in its step, from 1.

    `read`: output of each choice before the step. `choice`, `step`: what the step adds to which
    choice; nothing if the step is the totals.
    """

    origin: StreamOrigin
    read: tuple[Progress, ...]
    choice: int
    step: Progress
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the id in a client's header. Raises ApiError."""
        found = _ID.fullmatch(text)
        if found is None:
            raise _not_of_request(text, "the id of an event that a stream of this service sent")
        origin = StreamOrigin(found["exchange"], int(found["created"]))
        read = tuple(map(Progress.parse, found["read"].split("_")))
        step = Progress.parse(found["step"])
        return cls(origin, read, int(found["choice"]), step, int(found["number"]))

    def __str__(self) -> str:
        start = f"{self.origin.exchange}.{self.origin.created_s}"
        return f"{_prefix(start, map(str, self.read), self.choice, self.step)}{self.number}"

    def check(self, num_choices: int) -> None:
        """Raises ApiError if the id is not of a stream of a request with that many choices."""
        if len(self.read) != num_choices or self.choice >= num_choices:
            raise _not_of_request(str(self), "the id of an event of the same request")

    @property
    def ends(self) -> tuple[Progress, ...]:
        """Output of each choice after the step."""
        before, after = self.read[: self.choice], self.read[self.choice + 1 :]
        return (*before, self.read[self.choice].plus(self.step), *after)


def _prefix(start: str, read: Iterable[str], choice: int, step: Progress) -> str:
    """Returns the ids of the events of a step, without their numbers."""
    return f"{start}.{'_'.join(read)}.{choice}.{step}."


def _not_of_request(text: str, allowed: str) -> ApiError:
    message = f"Last-Event-ID is {quoted(text)!r}; allowed: {allowed}"
    return invalid(message, code="last_event_id_invalid")


class StreamPlace:
    """Place in the stream of a request: names the events, and knows those that the client has.

    `resumed`: the last event that the client has; None for a new stream.
    """

    def __init__(
        self, origin: StreamOrigin, num_choices: int, resumed: EventId | None = None
    ) -> None:
        self.origin = origin
        self.resumed = resumed
        self._start = f"{origin.exchange}.{origin.created_s}"
        self._read = [Progress()] * num_choices
        self._read_texts = list(map(str, self._read))
        self._prefix = ""
        self._number = 0
        # Number of the step's events that the client has; None: all of them.
        self._num_known: int | None = 0
        self._is_past = resumed is None

    def advance(self, event: Event) -> None:
        """Begins the step of `event`."""
        choice, step = 0, Progress()
        if isinstance(event, Delta):
            choice, step = event.index, Progress.of(event)
        self._prefix = _prefix(self._start, self._read_texts, choice, step)
        self._read[choice] = self._read[choice].plus(step)
        self._read_texts[choice] = str(self._read[choice])
        self._number = 0
        self._num_known = 0
        if self._is_past:
            return
        assert self.resumed is not None, "a new stream is past"
        if isinstance(event, Delta) and self._read[choice].is_within(self.resumed.read[choice]):
            self._num_known = None
            return
        self._is_past = True
        if (choice, step) == (self.resumed.choice, self.resumed.step):
            self._num_known = self.resumed.number

    def next_id(self) -> str | None:
        """Returns the id of the next event; None if the client has the event."""
        self._number += 1
        if self._num_known is None or self._number <= self._num_known:
            return None
        return f"{self._prefix}{self._number}"

    async def identified(
        self, events: AsyncGenerator[object, None]
    ) -> AsyncGenerator[IdentifiedEvent, None]:
        """Yields the events that the client does not have, with their ids. Closes `events`."""
        async with aclosing(events):
            async for event in events:
                if (event_id := self.next_id()) is not None:
                    yield IdentifiedEvent(event_id, event)
