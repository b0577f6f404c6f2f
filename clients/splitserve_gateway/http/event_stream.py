"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from splitserve_gateway.http.errors import ApiError, error_of

# Proxies cut a connection on which nothing comes for a minute, some for half of it.
_SILENCE_S = 15.0
_COMMENT = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How events are written. `end`: what follows the last. `is_named`: by their `type`."""

    end: bytes = b"data: [DONE]\n\n"
    is_named: bool = False

    def encode(self, content: object) -> bytes:
        """One event."""
        data = b"data: " + to_json(content) + b"\n\n"
        if self.is_named and isinstance(content, dict):
            return b"event: " + str(content.get("type", "error")).encode() + b"\n" + data
        return data

    def last_words(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return self.encode(error.body()) + self.end


PLAIN_EVENTS = EventFormat()
NAMED_EVENTS = EventFormat(end=b"", is_named=True)
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def event_stream(
    events: AsyncGenerator[object, None],
    form: EventFormat = PLAIN_EVENTS,
    silence_s: float = _SILENCE_S,
) -> Response:
    """Streams `events` as JSON, then `[DONE]`.

    The first is awaited for a while before anything is sent, so what is refused has its own status.
    After `silence_s` in which nothing was sent a comment is.
    Raises what `events` raise before it. Closes `events`, however it ends.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=silence_s)
        if first.done():
            first.result()
    except BaseException:
        await _close(first, events)
        raise
    return EventStream(first, events, form, silence_s)


class EventStream(StreamingResponse):
    """The answer that `event_stream` makes."""

    def __init__(
        self,
        first: asyncio.Future[object],
        events: AsyncGenerator[object, None],
        form: EventFormat,
        silence_s: float,
    ) -> None:
        super().__init__((), 200, _HEADERS, "text/event-stream")
        self._first = first
        self._events = events
        self._form = form
        self._silence_s = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything. Where it is cancelled, `last_words` in the scope's state can follow."""
        sender = _Sender(send, self._silence_s)
        scope.setdefault("state", {})["last_words"] = self._form.last_words
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
            await sender.send(self._form.encode(await self._first))
            async for event in self._events:
                await sender.send(self._form.encode(event))
        except StopAsyncIteration:
            return self._form.end
        except Exception as error:
            # The stream has begun: whatever it was is its last event.
            return self._form.last_words(error_of(error))
        return self._form.end


class _Sender:
    """Sends, and a comment whenever nothing was sent for a while."""

    def __init__(self, send: Send, silence_s: float) -> None:
        self._send = send
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._is_sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on comments may be sent."""
        self._timer = self._loop.call_later(self._silence_s, self._look)

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
        if silent_s >= self._silence_s and not self._is_sending:
            self._comment = asyncio.create_task(self.send(_COMMENT))
            silent_s = 0.0
        again_s = max(self._silence_s - silent_s, self._silence_s / 10)
        self._timer = self._loop.call_later(again_s, self._look)


async def _close(first: asyncio.Future[object], events: AsyncGenerator[object, None]) -> None:
    if not first.done():
        first.cancel()
        await asyncio.wait({first})
    if not first.cancelled():
        first.exception()
    await events.aclose()
