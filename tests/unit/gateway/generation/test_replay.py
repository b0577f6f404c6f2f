"""Streams that are resumed after any event, by a model: choices of numbered tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_gateway.generation import (
    ChoiceEnd,
    Delta,
    Event,
    EventId,
    StreamOrigin,
    StreamPlace,
    Totals,
    cut_at,
    replayed,
)
from splitserve_gateway.http import ApiError
from splitserve_text import Finish, FinishReason, SequenceFinish, Tokens, Usage

ORIGIN = StreamOrigin("a" * 32, 17)


@dataclass(frozen=True, slots=True)
class Output:
    """Steps of a stream, each of one choice: number of new tokens, and whether it ends then."""

    num_choices: int
    steps: list[tuple[int, int, bool]]

    def tokens(self) -> Iterator[Tokens]:
        """The tokens of each step; those of a choice are 0, 1, 2 ..."""
        lengths = [0] * self.num_choices
        for choice, num_tokens, has_end in self.steps:
            start, lengths[choice] = lengths[choice], lengths[choice] + num_tokens
            finish = SequenceFinish(choice, FinishReason.STOP, None, lengths[choice])
            yield Tokens(
                tuple(range(start, lengths[choice])),
                index=choice,
                finish=finish if has_end else None,
            )


@st.composite
def pairs_of_outputs(draw: st.DrawFn) -> tuple[Output, Output]:
    """The same tokens of the same choices, arriving in two ways."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))

    def arriving() -> Output:
        remaining, steps = list(lengths), []
        open_choices = set(range(len(lengths)))
        while open_choices:
            choice = draw(st.sampled_from(sorted(open_choices)))
            size = draw(st.integers(1 if remaining[choice] else 0, max(remaining[choice], 0)))
            remaining[choice] -= size
            has_end = not remaining[choice] and (size == 0 or draw(st.booleans()))
            if has_end:
                open_choices.discard(choice)
            steps.append((choice, size, has_end))
        return Output(len(lengths), steps)

    return arriving(), arriving()


@dataclass
class Client:
    """What a client has read: contents of events, and their ids."""

    seen: list[tuple[str, object]] = field(default_factory=list)

    def read(self, event_id: str, content: object) -> None:
        """Reads an event."""
        self.seen.append((event_id, content))

    def outputs(self, num_choices: int) -> list[list[object]]:
        """All that was read of each choice, and what belongs to none."""
        found: list[list[object]] = [[] for _ in range(num_choices + 1)]
        for _, content in self.seen:
            choice, *parts = content if isinstance(content, tuple) else (num_choices, content)
            found[choice] += parts
        return found


def events_of(event: Event, *, is_first: bool) -> Iterator[object]:
    """The events of a step: some for what it adds, and one more before the first."""
    if is_first:
        yield "start"
    if isinstance(event, Delta):
        middle = len(event.token_ids) // 2
        for part in (event.token_ids[:middle], event.token_ids[middle:]):
            if part:
                yield (event.index, *part)
        if event.end is not None:
            yield (event.index, "end")
    else:
        yield "usage"
        yield "last"


async def in_deltas(events: AsyncGenerator[Tokens | Finish, None]) -> AsyncGenerator[Event, None]:
    async for event in events:
        if isinstance(event, Finish):
            yield Totals()
        else:
            end = None if event.finish is None else ChoiceEnd("stop")
            yield Delta(event.index, "", event.token_ids, end=end)


async def arriving(output: Output) -> AsyncGenerator[Tokens | Finish, None]:
    for tokens in output.tokens():
        yield tokens
    yield Finish(FinishReason.STOP, None, Usage(1, 1, 0, 0))


async def stream(events: AsyncIterator[Event], place: StreamPlace) -> Client:
    client = Client()
    is_first = True
    async for event in events:
        place.advance(event)
        for content in events_of(event, is_first=is_first):
            if (event_id := place.next_id()) is not None:
                client.read(event_id, content)
        is_first = False
    return client


async def stream_whole(output: Output) -> Client:
    return await stream(in_deltas(arriving(output)), StreamPlace(ORIGIN, output.num_choices))


async def resume(output: Output, last_event_id: str) -> Client:
    resumed = EventId.parse(last_event_id)
    resumed.check(output.num_choices)
    events = replayed(in_deltas(cut_at(arriving(output), resumed, 0)), resumed)
    return await stream(events, StreamPlace(resumed.origin, output.num_choices, resumed))


@given(pairs_of_outputs())
def test_stream_goes_on_after_any_event(pair: tuple[Output, Output]) -> None:
    first, second = pair
    num_choices = first.num_choices
    whole = asyncio.run(stream_whole(first))
    outputs = whole.outputs(num_choices)
    ids = [event_id for event_id, _ in whole.seen]
    assert len(set(ids)) == len(ids)
    for number, (event_id, _) in enumerate(whole.seen, 1):
        rest = asyncio.run(resume(second, event_id))
        assert Client(whole.seen[:number] + rest.seen).outputs(num_choices) == outputs
        # The rest of the step comes as it was.
        step = event_id.rpartition(".")[0]
        same = [seen for seen in whole.seen[number:] if seen[0].rpartition(".")[0] == step]
        assert rest.seen[: len(same)] == same
        # And the stream that went on can be resumed in turn, from its own ids.
        if rest.seen:
            again = asyncio.run(resume(first, rest.seen[0][0]))
            joined = [*whole.seen[:number], rest.seen[0], *again.seen]
            assert Client(joined).outputs(num_choices) == outputs


def test_other_output_is_refused() -> None:
    one = Output(1, [(0, 3, False), (0, 0, True)])
    shorter = Output(1, [(0, 2, True)])
    (*_, last) = asyncio.run(stream_whole(one)).seen
    with pytest.raises(ApiError, match="the output differs"):
        asyncio.run(resume(shorter, last[0]))


def test_ids_and_seeds_come_from_the_exchange() -> None:
    other = StreamOrigin("b" * 32, 17)
    assert [ORIGIN.seed(0), ORIGIN.seed(1)] == [StreamOrigin("a" * 32, 99).seed(n) for n in (0, 1)]
    assert len({ORIGIN.seed(0), ORIGIN.seed(1), other.seed(0)}) == 3
    assert 0 <= ORIGIN.seed(0) < 2**63

    def drawn(origin: StreamOrigin, choice: int) -> str:
        draw = origin.draw(choice)
        return "".join(draw("abcdefgh") for _ in range(40))

    assert drawn(ORIGIN, 0) == drawn(StreamOrigin("a" * 32, 99), 0)
    assert len({drawn(ORIGIN, 0), drawn(ORIGIN, 1), drawn(other, 0)}) == 3
