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
