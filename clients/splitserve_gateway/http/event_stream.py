"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from splitserve_gateway.http.errors import ApiError, error_of

# Proxies cut a connection on which nothing comes for a minute, some for half of it.
_SILENCE_S = 15.0
_COMMENT = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def event_stream(events: AsyncGenerator[object, None]) -> Response:
    """Streams `events` as JSON, then `[DONE]`.

    The first is awaited for a while before anything is sent, so what is refused has its own status.
    Raises what `events` raise before it. Closes `events`, however it ends.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=_SILENCE_S)
        if first.done():
            first.result()
    except BaseException:
        await _close(first, events)
        raise
    return EventStream(first, events)


def error_event(error: ApiError) -> bytes:
    """The last bytes of a stream that fails."""
    return _encode(error.body()) + _DONE


class EventStream(StreamingResponse):
    """The answer that `event_stream` makes."""

    def __init__(self, first: asyncio.Future[object], events: AsyncGenerator[object, None]) -> None:
        super().__init__((), 200, _HEADERS, "text/event-stream")
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything. Raises CancelledError in time for an error event."""
        sender = _Sender(send)
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            sender.start()
            last = await self._send_events(sender)
        finally:
            await sender.stop()
            await _close(self._first, self._events)
        await send({"type": "http.response.body", "body": last})

    async def _send_events(self, sender: _Sender) -> bytes:
        """Returns what remains to be sent."""
        try:
            await sender.send(_encode(await self._first))
            async for event in self._events:
                await sender.send(_encode(event))
        except StopAsyncIteration:
            return _DONE
        except Exception as error:
            # The stream has begun: whatever it was is its last event.
            return error_event(error_of(error))
        return _DONE


class _Sender:
    """Sends, and a comment whenever nothing was sent for a while."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._is_sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on comments may be sent."""
        self._timer = self._loop.call_later(_SILENCE_S, self._look)

    async def send(self, data: bytes) -> None:
        """Returns when there is room for more."""
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._last_s = self._loop.time()

    async def stop(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.wait({self._comment})

    def _look(self) -> None:
        silent_s = self._loop.time() - self._last_s
        if silent_s >= _SILENCE_S and not self._is_sending:
            self._comment = asyncio.create_task(self.send(_COMMENT))
            silent_s = 0.0
        self._timer = self._loop.call_later(max(_SILENCE_S - silent_s, 1.0), self._look)


def _encode(content: object) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


async def _close(first: asyncio.Future[object], events: AsyncGenerator[object, None]) -> None:
    if not first.done():
        first.cancel()
        await asyncio.wait({first})
    if not first.cancelled():
        first.exception()
    await events.aclose()
