"""One request and its answer, from its arrival to its end, however that comes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve_gateway.http.errors import ApiError, error_of, quoted
from splitserve_gateway.tracing import ExchangeTrace, exchange_trace
from splitserve_rpc.log_context import LogContext, log_context

# What a client that does not read has to take the last event.
_LAST_WORDS_S = 2.0
_OTHER = "other"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that is over. `path`: as the application has it, `other` for one it has not.

    `code`: 0 where the answer had not begun. `first_byte_s`: of the body; None: there was none.
    """

    path: str
    code: int
    first_byte_s: float | None
    duration_s: float


class Exchange:
    """Runs the application for one request; ends it when the client is gone, or when told to.

    Whatever goes wrong becomes an answer in OpenAI's shape, or the last event of a stream.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, trace: ExchangeTrace | None = None
    ) -> None:
        """`trace`: None where nobody writes any."""
        self._scope = scope
        self._trace = trace
        self._raw_receive = receive
        self._raw_send = send
        self._id = f"req_{secrets.token_hex(16)}".encode()
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._error: ApiError | None = None
        self._is_gone = False
        self._has_started = False
        self._is_complete = False
        self._began_s = time.monotonic()
        self._first_byte_s: float | None = None
        self._code = 0

    def over(self) -> Answered:
        """It is; what became of it."""
        # Callers can make up any number of paths.
        path = getattr(self._scope.get("route"), "path", _OTHER)
        if self._trace is not None:
            self._trace.end(path, self._code, self._id.decode())
        duration_s = time.monotonic() - self._began_s
        return Answered(path, self._code, self._first_byte_s, duration_s)

    async def run(self, app: ASGIApp, timeout_s: float) -> None:
        """Answers the request within `timeout_s`."""
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
        """Ends what runs, with `error` as the answer; None: there is nobody to answer."""
        if self._task is not None and self._error is None and not self._is_gone:
            self._error = error
            self._is_gone = error is None
            self._task.cancel()

    async def fail(self, error: ApiError) -> None:
        """Answers with `error`, as far as there is still something to answer."""
        if self._is_gone or self._is_complete:
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if not self._has_started:
                    await error.response()(self._scope, self._raw_receive, self._send)
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
            assert self._task is not None, "it was ended"
            self._task.uncancel()
        except Exception as error:
            # One request fails, whatever it was.
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
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._raw_send(message)
        if self._first_byte_s is None and message.get("body"):
            self._first_byte_s = time.monotonic() - self._began_s
            if self._trace is not None:
                self._trace.answer_began()

    async def _watch(self) -> None:
        """All of the body is there: what comes now is the end of the connection."""
        while (await self._raw_receive())["type"] != "http.disconnect":
            pass
        self.end(None)

    async def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    async def _cut(self) -> None:
        """Ends the connection of an answer that cannot be completed."""
        cut = self._state.get("cut")
        if cut is not None:
            cut()
            # The server is to know before this request ends.
            while (await self._raw_receive())["type"] != "http.disconnect":
                pass


def _took_too_long() -> ApiError:
    message = "the request took longer than the gateway allows"
    return ApiError(504, "timeout_error", message, code="request_timeout")
