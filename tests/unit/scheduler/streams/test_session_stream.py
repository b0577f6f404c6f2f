"""What several steps bring to a Session goes out as one message where that says the same."""

from __future__ import annotations

import numpy as np

from scheduler_service.request_limits import RequestName
from scheduler_service.streams.outbox import Outbox, Unread
from scheduler_service.streams.sinks import SessionStream
from splitserve.scheduler.v1 import scheduler_pb2 as api

FINISH = api.Finish(reason=api.FINISH_REASON_LENGTH)


class _Session:
    def __init__(self, *handles: int) -> None:
        self.stream = SessionStream(Outbox(Unread(10_000, 10_000)))
        self.begin(*handles)

    def begin(self, *handles: int) -> None:
        for handle in handles:
            self.stream.begin(handle, RequestName(f"r{handle}"))

    def step(self, *tokens: tuple[int, int], ends: tuple[int, ...] = ()) -> None:
        if tokens:
            handles, token_ids = np.array(tokens, np.int32).T
            self.stream.plain_tokens(handles, token_ids)
        for handle in ends:
            self.stream.end(handle, FINISH)
        self.stream.flush()

    async def next_message(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Its tokens, and the handles of its events."""
        response = api.SessionResponse.FromString(await self.stream.outbox.get() or b"")
        tokens = list(zip(response.handles, response.token_ids, strict=True))
        return tokens, [event.handle for event in response.events]


async def test_session_sends_one_message_when_requests_end_in_several_steps() -> None:
    session = _Session(1, 2, 3)
    session.step((1, 5), (2, 6), ends=(1,))
    session.step((2, 7), (3, 8), ends=(2,))
    session.step((3, 9))
    tokens = [(1, 5), (2, 6), (2, 7), (3, 8), (3, 9)]
    assert await session.next_message() == (tokens, [1, 2])
    assert session.stream.outbox.is_empty


async def test_session_keeps_order_when_a_handle_is_used_again_before_its_end_was_sent() -> None:
    session = _Session(1, 2)
    session.step((1, 5), (2, 6), ends=(1,))
    session.begin(1)
    session.step((1, 7), ends=(2,))
    assert await session.next_message() == ([(1, 5), (2, 6)], [1])
    assert await session.next_message() == ([(1, 7)], [2])


async def test_session_joins_again_when_the_end_of_a_handle_was_sent_before_it_is_used() -> None:
    session = _Session(1, 2)
    session.step((1, 5), ends=(1,))
    await session.next_message()
    session.step((2, 6), ends=(2,))
    session.begin(1)
    session.step((1, 7))
    assert await session.next_message() == ([(2, 6), (1, 7)], [2])


async def test_session_sends_tokens_after_events_when_these_have_tokens() -> None:
    session = _Session(1, 2)
    session.stream.put(1, tokens=api.TokenChunk(token_ids=[5]))
    session.step((2, 6))
    session.step((1, 7))
    assert await session.next_message() == ([(2, 6)], [1])
    assert await session.next_message() == ([(1, 7)], [])
