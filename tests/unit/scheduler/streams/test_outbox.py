"""Tests what waits for a reader, and how messages of a session are joined."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from scheduler_service.request_limits import RequestName
from scheduler_service.streams import Outbox, SessionStream, UnreadLimits
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError


def message(num_bytes: int) -> api.AbortRequest:
    return api.AbortRequest(request_id="x" * (num_bytes - 2))


def test_outbox_is_unread_when_too_much_waited_before() -> None:
    outbox = Outbox(UnreadLimits(300, 1000))
    outbox.put(message(100))
    assert not outbox.is_unread()
    outbox.put(message(100))
    outbox.put(message(100))
    assert not outbox.is_unread()  # 164 before, what is new does not count
    outbox.put(message(3))
    assert outbox.is_unread()


async def test_outbox_is_not_unread_when_one_large_message_is_being_written() -> None:
    outbox = Outbox(UnreadLimits(300, 1000))
    outbox.put(message(100))
    outbox.put(message(120))
    assert not outbox.is_unread()
    await outbox.get()
    assert not outbox.is_unread()
    assert outbox.num_bytes == 2 * 64 + 220
    await outbox.get()
    assert outbox.num_bytes == 64 + 120


async def test_outbox_brings_what_is_queued_when_it_ends_with_an_error() -> None:
    outbox = Outbox(unread := UnreadLimits(300, 1000))
    outbox.put(message(5))
    outbox.end(DomainError("DRAINING", "the end"))
    outbox.put(message(6))
    outbox.end()
    assert await outbox.get() == message(5).SerializeToString()
    with pytest.raises(DomainError, match="the end"):
        await outbox.get()
    assert unread.num_bytes == 0


async def test_outbox_counts_nothing_when_it_is_closed() -> None:
    outbox = Outbox(unread := UnreadLimits(300, 1000))
    outbox.put(message(5))
    outbox.put(message(6))
    await outbox.get()
    outbox.close(DomainError("STREAM_NOT_READ", "too much"))
    assert unread.num_bytes == outbox.num_bytes == 0
    with pytest.raises(DomainError, match="too much"):
        await outbox.get()
    assert unread.num_bytes == outbox.num_bytes == 0


async def test_outbox_has_room_again_when_half_of_it_was_read() -> None:
    outbox = Outbox(UnreadLimits(300, 1000))
    outbox.put(message(50))
    outbox.put(message(50))
    waiting = asyncio.ensure_future(outbox.wait_for_room())
    await outbox.get()
    await asyncio.sleep(0)
    assert not waiting.done()
    await outbox.get()
    await waiting


def plain(*tokens: tuple[int, int]) -> api.SessionResponse:
    handles, token_ids = zip(*tokens, strict=True)
    return api.SessionResponse(handles=handles, token_ids=token_ids)


def ended(handle: int) -> api.SessionEvent:
    return api.SessionEvent(handle=handle, finish=api.Finish())


async def test_outbox_joins_what_waits_up_to_what_must_stay_apart() -> None:
    outbox = Outbox(unread := UnreadLimits(3000, 10_000))
    outbox.put(plain((1, 5), (2, 6)), joins_next=True)
    outbox.put(plain((1, 7)), joins_next=True)
    last = plain((2, 8))
    last.events.append(ended(2))
    outbox.put(last)
    # The handle is free again: what comes now must not be before that end.
    outbox.put(plain((2, 9)), joins_next=True)

    first = api.SessionResponse.FromString(await outbox.get() or b"")
    assert list(zip(first.handles, first.token_ids, strict=True)) == [
        (1, 5),
        (2, 6),
        (1, 7),
        (2, 8),
    ]
    assert list(first.events) == [ended(2)]
    assert api.SessionResponse.FromString(await outbox.get() or b"") == plain((2, 9))
    outbox.end()
    assert await outbox.get() is None
    assert unread.num_bytes == outbox.num_bytes == 0


async def test_outbox_joins_no_more_than_a_bounded_number_of_bytes() -> None:
    outbox = Outbox(UnreadLimits(10_000_000, 10_000_000))
    large = plain(*((handle, 1) for handle in range(20_000)))
    for _ in range(4):
        outbox.put(large, joins_next=True)
    num_bytes = [len(await outbox.get() or b"") for _ in range(2)]
    assert num_bytes == [2 * large.ByteSize()] * 2
    assert large.ByteSize() < 80_000


FINISH = api.Finish(reason=api.FINISH_REASON_LENGTH)


class _Session:
    def __init__(self, *handles: int) -> None:
        self.stream = SessionStream(Outbox(UnreadLimits(10_000, 10_000)))
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


async def test_session_keeps_order_when_a_handle_is_reused() -> None:
    session = _Session(1, 2)
    session.step((1, 5), (2, 6), ends=(1,))
    session.begin(1)
    session.step((1, 7), ends=(2,))
    assert await session.next_message() == ([(1, 5), (2, 6)], [1])
    assert await session.next_message() == ([(1, 7)], [2])


async def test_session_joins_again_when_an_end_was_sent() -> None:
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
