from __future__ import annotations

import asyncio

import pytest

from scheduler_service.streams.outbox import Outbox, Unread
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError


def message(num_bytes: int) -> api.AbortRequest:
    return api.AbortRequest(request_id="x" * (num_bytes - 2))


def test_outbox_is_unread_when_too_much_waited_before() -> None:
    outbox = Outbox(Unread(300, 1000))
    outbox.put(message(100))
    assert not outbox.is_unread()
    outbox.put(message(100))
    outbox.put(message(100))
    assert not outbox.is_unread()  # 164 before, what is new does not count
    outbox.put(message(3))
    assert outbox.is_unread()


async def test_outbox_is_not_unread_when_one_large_message_is_being_written() -> None:
    outbox = Outbox(Unread(300, 1000))
    outbox.put(message(100))
    outbox.put(message(120))
    assert not outbox.is_unread()
    await outbox.get()
    assert not outbox.is_unread()
    assert outbox.num_bytes == 2 * 64 + 220
    await outbox.get()
    assert outbox.num_bytes == 64 + 120


async def test_outbox_brings_what_is_queued_when_it_ends_with_an_error() -> None:
    outbox = Outbox(unread := Unread(300, 1000))
    outbox.put(message(5))
    outbox.end(DomainError("DRAINING", "the end"))
    outbox.put(message(6))
    outbox.end()
    assert await outbox.get() == message(5).SerializeToString()
    with pytest.raises(DomainError, match="the end"):
        await outbox.get()
    assert unread.num_bytes == 0


async def test_outbox_counts_nothing_when_it_was_closed_while_a_message_is_written() -> None:
    outbox = Outbox(unread := Unread(300, 1000))
    outbox.put(message(5))
    outbox.put(message(6))
    await outbox.get()
    outbox.close(DomainError("STREAM_NOT_READ", "too much"))
    assert unread.num_bytes == outbox.num_bytes == 0
    with pytest.raises(DomainError, match="too much"):
        await outbox.get()
    assert unread.num_bytes == outbox.num_bytes == 0


async def test_outbox_has_room_again_when_half_of_it_was_read() -> None:
    outbox = Outbox(Unread(300, 1000))
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
    outbox = Outbox(unread := Unread(3000, 10_000))
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
    outbox = Outbox(Unread(10_000_000, 10_000_000))
    large = plain(*((handle, 1) for handle in range(20_000)))
    for _ in range(4):
        outbox.put(large, joins_next=True)
    num_bytes = [len(await outbox.get() or b"") for _ in range(2)]
    assert num_bytes == [2 * large.ByteSize()] * 2
    assert large.ByteSize() < 80_000
