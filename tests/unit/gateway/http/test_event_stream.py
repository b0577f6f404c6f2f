"""Streams of events: what is sent where there is nothing to tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from splitserve_gateway.http.exchange import event_stream

pytestmark = pytest.mark.asyncio
COMMENT = b": waiting\n\n"
SOON_S = 0.001


class Sent:
    """What a stream sent; `has_comments` is set once there are two comments more."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.has_comments = asyncio.Event()

    async def send(self, message: Message) -> None:
        if "body" in message:
            self.pieces.append(message["body"])
        if self.pieces[-2:] == [COMMENT] * 2:
            self.has_comments.set()

    async def comments(self) -> None:
        self.has_comments.clear()
        await self.has_comments.wait()


async def sent_by(
    events: AsyncGenerator[object, None], silence_s: float, sent: Sent
) -> list[bytes]:
    async def receive() -> Message:
        raise AssertionError("a stream of events reads nothing")

    async with asyncio.timeout(240):
        response = await event_stream(events, silence_s=silence_s)
        await response({"type": "http"}, receive, sent.send)
    return sent.pieces


async def test_comments_are_sent_while_nothing_comes() -> None:
    sent = Sent()

    async def events() -> AsyncGenerator[object, None]:
        await sent.comments()
        yield 1
        await sent.comments()
        yield 2

    pieces = await sent_by(events(), SOON_S, sent)

    told = [piece for piece in pieces if piece != COMMENT]
    assert told == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    assert pieces.index(told[0]) >= 2
    assert pieces.index(told[1]) >= pieces.index(told[0]) + 3


async def test_no_comment_is_sent_while_events_come() -> None:
    async def events() -> AsyncGenerator[object, None]:
        for number in range(50):
            await asyncio.sleep(0)
            yield number

    pieces = await sent_by(events(), 15.0, Sent())

    assert len(pieces) == 51
    assert COMMENT not in pieces
