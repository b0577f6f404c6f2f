"""Repeats the beginning of a stream in the steps that its client knows (see `stream_places`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

from splitserve_gateway.generation.deltas import Delta, Event
from splitserve_gateway.generation.stream_places import EventId, Progress
from splitserve_gateway.http import invalid
from splitserve_text import Finish, Tokens


async def cut_at(
    events: AsyncGenerator[Tokens | Finish, None], resumed: EventId, first_choice: int
) -> AsyncGenerator[Tokens | Finish, None]:
    """Cuts the tokens of one prompt where steps of `resumed` begin and end. Closes `events`.

    `first_choice`: number of the prompt's first choice.
    """
    cuts = [
        {before.num_tokens, after.num_tokens}
        for before, after in zip(resumed.read, resumed.ends, strict=True)
    ][first_choice:]
    lengths = [0] * len(cuts)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finish):
                yield event
                continue
            for part in _cut(event, lengths[event.index], cuts[event.index]):
                yield part
            lengths[event.index] += len(event.token_ids)


def _cut(tokens: Tokens, position: int, cuts: set[int]) -> Iterator[Tokens]:
    """Yields `tokens`, which begin at `position` of a sequence, in parts without `cuts` inside.

    An end of the sequence comes after the last token, so a cut may be between them.
    """
    length = len(tokens.token_ids) + (tokens.finish is not None)
    inside = sorted(cut - position for cut in cuts if 0 < cut - position < length)
    start = 0
    for end in inside:
        yield replace(tokens, token_ids=tokens.token_ids[start:end], finish=None)
        start = end
    yield replace(tokens, token_ids=tokens.token_ids[start:])


async def replayed(
    events: AsyncGenerator[Event, None], resumed: EventId
) -> AsyncGenerator[Event, None]:
    """Yields what the client has read, then the step of `resumed` as one event, then the rest.

    Closes `events`. Raises ApiError if the output is another one.
    """
    beginning = _Beginning(resumed)
    async with aclosing(events):
        async for event in events:
            if beginning.take(event):
                yield event
            if beginning.is_complete:
                break
        for event in beginning.remaining():
            yield event
        async for event in events:
            yield event


class _Beginning:
    """Collects the beginning of a stream, up to the step of `resumed`."""

    def __init__(self, resumed: EventId) -> None:
        self._read = resumed.read
        self._ends = list(resumed.ends)
        self._found = [Progress()] * len(resumed.read)
        self._step: Delta | None = None
        self._later: list[Event] = []

    @property
    def is_complete(self) -> bool:
        """Whether the client's last step and all tokens before it have arrived."""
        return self._found == self._ends

    def take(self, event: Event) -> bool:
        """Takes the next event; returns whether the client has read all of it."""
        if isinstance(event, Delta):
            choice = event.index
            progress = self._found[choice].plus(Progress.of(event))
            if progress.is_within(self._ends[choice]):
                self._found[choice] = progress
                if progress.is_within(self._read[choice]):
                    return True
                self._step = event if self._step is None else _joined(self._step, event)
                return False
        self._later.append(event)
        return False

    def remaining(self) -> list[Event]:
        """Returns the step, and the events that came before it was complete. Raises ApiError."""
        if not self.is_complete:
            message = "Last-Event-ID belongs to another request: the output differs"
            raise invalid(message, code="last_event_id_invalid")
        return self._later if self._step is None else [self._step, *self._later]


def _joined(first: Delta, second: Delta) -> Delta:
    """Returns two consecutive deltas of a choice as one."""
    token_ids = first.token_ids + second.token_ids
    return Delta(first.index, first.text + second.text, token_ids, end=second.end)
