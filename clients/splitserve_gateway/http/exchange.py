"""One HTTP exchange (a request and its answer) from arrival to end, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve_common import LogContext, log_context
from splitserve_gateway.http.errors import ApiError, ErrorFormat, error_of, quoted
from splitserve_gateway.tracing import ExchangeTrace, exchange_trace

# Time for a client that does not read to take the last event.
_LAST_WORDS_S = 2.0
_OTHER = "other"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedExchange:
    """Summary of an ended request. `path`: path of the route, `other` for an unknown one.

    `code`: HTTP status, 0 if no answer began. `first_byte_s`: time to the first byte of the body;
    None without a body.
    """

    path: str
    code: int
    first_byte_s: float | None
    duration_s: float


class Exchange:
    """Runs the application for one request; ends it when the client leaves, or on `end`.

    Any exception becomes an answer in the format of its path, or the last event of a stream.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, trace: ExchangeTrace | None = None
    ) -> None:
        """Prepares the exchange. `trace`: None if tracing is off."""
        self._scope = scope
        self._trace = trace
        self._raw_receive = receive
        self._raw_send = send
        self._id = f"req_{secrets.token_hex(16)}".encode()
        self._form = ErrorFormat.of(scope["path"])
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._error: ApiError | None = None
        self._is_gone = False
        self._has_started = False
        self._is_complete = False
        self._began_s = time.monotonic()
        self._first_byte_s: float | None = None
        self._code = 0

    def over(self) -> EndedExchange:
        """Ends the trace, and returns the summary of the ended request."""
        # Only routes are named: callers can invent any number of paths.
        path = getattr(self._scope.get("route"), "path", _OTHER)
        if self._trace is not None:
            self._trace.end(path, self._code, self._id.decode())
        duration_s = time.monotonic() - self._began_s
        return EndedExchange(path, self._code, self._first_byte_s, duration_s)

    async def run(self, app: ASGIApp, timeout_s: float) -> None:
        """Answers the request; ends it with an error after `timeout_s`."""
        trace_id = "" if self._trace is None else self._trace.trace_id
        log_context.set(LogContext(self._id.decode(), trace_id))
        exchange_trace.set(self._trace)
        timer = asyncio.get_running_loop().call_later(timeout_s, self.end, _took_too_long())
        try:
            await self._run(app)
        finally:
            timer.cancel()
            await self._stop_watching()
        if self._error is not None:
            await self.fail(self._error)

    def end(self, error: ApiError | None) -> None:
        """Cancels the running application. `error`: the answer; None if the client has left."""
        if self._task is not None and self._error is None and not self._is_gone:
            self._error = error
            self._is_gone = error is None
            self._task.cancel()

    async def fail(self, error: ApiError) -> None:
        """Answers with `error`, as a response or as the last event of a stream.

        Sends nothing if the client has left or the answer is complete.
        """
        if self._is_gone or self._is_complete:
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if not self._has_started:
                    response = error.response(self._form, self._id.decode())
                    await response(self._scope, self._raw_receive, self._send)
                elif (last_words := self._state.get("last_words")) is not None:
                    await self._send({"type": "http.response.body", "body": last_words(error)})
        except TimeoutError:
            _log.info("answer_not_read path=%r", quoted(self._scope["path"]))
        if not self._is_complete:
            await self._cut()

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scope.get("state", {})
        return state

    async def _run(self, app: ASGIApp) -> None:
        self._task = asyncio.current_task()
        try:
            await app(self._scope, self._receive, self._send)
        except ClientDisconnect:
            self._is_gone = True
        except asyncio.CancelledError:
            if self._error is None and not self._is_gone:
                raise
            assert self._task is not None, "`end` cancelled the task"
            self._task.uncancel()
        except Exception as error:
            # Any exception fails only this request.
            self._error = error_of(error)
        finally:
            self._task = None

    async def _receive(self) -> Message:
        message = await self._raw_receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._watcher = self._watcher or asyncio.create_task(self._watch())
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            self._code = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._id)]
            if self._form is ErrorFormat.ANTHROPIC:
                headers.append((b"request-id", self._id))
            message["headers"] = headers
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._raw_send(message)
        if self._first_byte_s is None and message.get("body"):
            self._first_byte_s = time.monotonic() - self._began_s
            if self._trace is not None:
                self._trace.answer_began()

    async def _watch(self) -> None:
        """Ends the exchange when the connection ends. Starts once the whole body has arrived."""
        while (await self._raw_receive())["type"] != "http.disconnect":
            pass
        self.end(None)

    async def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    async def _cut(self) -> None:
        """Aborts the connection of an answer that cannot be completed."""
        cut = self._state.get("cut")
        if cut is not None:
            cut()
            # Waits until the server has noticed, before this request ends.
            while (await self._raw_receive())["type"] != "http.disconnect":
                pass


def _took_too_long() -> ApiError:
    message = "the request took longer than the gateway allows"
    return ApiError(504, "timeout_error", message, code="request_timeout")


# -- Server-sent events ----------------------------------------------------------------------------

# Proxies cut connections that are silent for a minute, some after half a minute.
_SILENCE_S = 15.0
_COMMENT = b": waiting\n\n"
# Without the blank line: the comment belongs to the event that comes next.
_COMMENT_IN_EVENT = b": waiting\n"


@dataclass(frozen=True, slots=True)
class IdentifiedEvent:
    """Event with the id from which a client can resume the stream."""

    event_id: str
    content: object


@dataclass(frozen=True, slots=True)
class EventFormat:
    """Encoding of events. `end`: sent after the last event.

    `is_named`: events are named by `type`. `errors`: format of an error as the last event. `idle`:
    sent during silence after the first event.
    """

    end: bytes = b"data: [DONE]\n\n"
    is_named: bool = False
    errors: ErrorFormat = ErrorFormat.OPENAI
    idle: bytes = _COMMENT

    def idle_after(self, content: object) -> bytes:
        """Returns what is sent during silence after an event.

        To OpenAI's client a blank line after an id is an event without data, which it cannot read.
        """
        has_id = isinstance(content, IdentifiedEvent)
        return _COMMENT_IN_EVENT if has_id and self.idle is _COMMENT else self.idle

    def encode(self, content: object) -> bytes:
        """Returns the bytes of one event."""
        if isinstance(content, IdentifiedEvent):
            event = self.encode(content.content)
            return event[:-1] + b"id: " + content.event_id.encode() + b"\n\n"
        data = b"data: " + to_json(content) + b"\n\n"
        if self.is_named and isinstance(content, dict):
            return b"event: " + str(content.get("type", "error")).encode() + b"\n" + data
        return data

    def last_words(self, error: ApiError) -> bytes:
        """Returns the last bytes of a stream that fails."""
        context = log_context.get()
        request_id = "" if context is None else context.request_id
        return self.encode(error.body(self.errors, request_id)) + self.end


PLAIN_EVENTS = EventFormat()
NAMED_EVENTS = EventFormat(end=b"", is_named=True)
MESSAGE_EVENTS = EventFormat(
    end=b"",
    is_named=True,
    errors=ErrorFormat.ANTHROPIC,
    idle=b'event: ping\ndata: {"type": "ping"}\n\n',
)
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def event_stream(
    events: AsyncGenerator[object, None],
    form: EventFormat = PLAIN_EVENTS,
    silence_s: float = _SILENCE_S,
) -> Response:
    """Returns a response that streams `events` as JSON, then `[DONE]`.

    Waits up to `silence_s` for the first event, so a refusal gets its own status. Sends a comment
    (later the format's `idle`) after each `silence_s` without data. Raises exceptions that precede
    the first event. Closes `events` in every case.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=silence_s)
        # A resumed stream may have no events left.
        if first.done() and not isinstance(first.exception(), StopAsyncIteration):
            first.result()
    except BaseException:
        await _close(first, events)
        raise
    return EventStream(first, events, form, silence_s)


class EventStream(StreamingResponse):
    """Response of `event_stream`."""

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
        """Sends all events.

        After a cancellation the caller can send `last_words` of the scope's state.
        """
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
        """Sends the events; returns the bytes that end the stream."""
        try:
            first = await self._first
            await sender.send(self._form.encode(first))
            sender.idle = self._form.idle_after(first)
            async for event in self._events:
                await sender.send(self._form.encode(event))
        except StopAsyncIteration:
            return self._form.end
        except Exception as error:
            # The stream has begun: the error becomes its last event.
            return self._form.last_words(error_of(error))
        return self._form.end


class _Sender:
    """Sends data, and `idle` (at first a comment) after each period of silence."""

    def __init__(self, send: Send, silence_s: float) -> None:
        self.idle = _COMMENT
        self._send = send
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._is_sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the timer for comments."""
        self._timer = self._loop.call_later(self._silence_s, self._look)

    async def send(self, data: bytes) -> None:
        """Sends `data`; returns when the connection has room for more."""
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._last_s = self._loop.time()

    async def stop(self) -> None:
        """Stops comments, and waits for one that is being sent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.wait({self._comment})

    def _look(self) -> None:
        silent_s = self._loop.time() - self._last_s
        if silent_s >= self._silence_s and not self._is_sending:
            self._comment = asyncio.create_task(self.send(self.idle))
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
