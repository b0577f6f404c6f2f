"""HTTP/1.1 connections, with bounds on what one may cost before a request is known."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from splitserve_gateway.http.errors import ApiError, invalid
from splitserve_gateway.http.request_parser import RequestParser

_MAX_HEAD_BYTES = 64 * 1024
# Of each header, besides its name and value: a colon, a space, the end of the line.
_HEADER_EXTRA_BYTES = 4
# For all of a request's headers to come.
HEAD_TIMEOUT_S = 30.0
# For a client that is still sending to see the answer, and that nobody reads on.
LINGER_S = 5.0
# Over TLS, where a connection cannot be half closed: with nothing new for so long it is over.
_LINGER_SILENCE_S = 0.5
# A peer that takes nothing for so long, not even the end of what was sent, is gone.
_UNACKNOWLEDGED_MS = 120_000
# What the kernel keeps for a client that does not read; left to itself it keeps MiB.
_SEND_BYTES = 128 * 1024
_UNWRITTEN_BYTES = 64 * 1024
# Requests sent ahead on one connection while another is answered.
_MAX_PIPELINED = 16


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol, but for these.

    The head of a request is bounded in size and time, and so is what follows a body. A client that
    leaves is noticed whichever of its pipelined requests is answered, since reading never stops:
    one that sends too much ahead is cut instead. What is no HTTP is refused in OpenAI's shape. An
    answer that does not wait for the whole body is the connection's last.

    `leave` is called when it is over, if it was made at all.

    `scope["state"]["cut"]()` ends the connection of a request at once.
    """

    leave: Callable[[], None]
    is_made = False
    _running: RequestResponseCycle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _silence_timer: asyncio.TimerHandle | None = None
    # As they are parsed, and as they come since the last part of a body; the latter has what is
    # not parsed yet.
    _num_head_bytes = 0
    _num_new_bytes = 0
    _is_last = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.is_made = True
        super().connection_made(transport)
        # Over TLS it would be more, besides what the kernel keeps.
        transport.set_write_buffer_limits(_UNWRITTEN_BYTES)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        plain = transport.get_extra_info("socket")
        if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._end_head()
        for timer in (self._linger_timer, self._silence_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.pipeline.clear()
        # Uvicorn tells the request that came last; the one that is answered may be another.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._await_silence()
            return
        self._num_new_bytes += len(data)
        super().data_received(data)
        if self._num_new_bytes > _MAX_HEAD_BYTES and self._linger_timer is None:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _HEADER_EXTRA_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._end_head()
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED:
            self._cut()
        elif self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_new_bytes = 0
        super().on_body(body)
        if self.pipeline and self.flow.read_paused:
            self._cut()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_new_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    def on_response_complete(self) -> None:
        if self._is_last:
            self._linger()
        else:
            super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        async def answer(scope: Scope, receive: Receive, _: Send) -> None:
            await app(scope, receive, send)

        async def send(message: Message) -> None:
            is_early = message["type"] == "http.response.start" and cycle.more_body
            if is_early:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await cycle.send(message)  # type: ignore[arg-type]
            if is_early and not cycle.disconnected:
                # It ends by lingering, not by the close that uvicorn would do.
                self._is_last = cycle.keep_alive = True

        self._running = cycle
        cycle.scope["state"]["cut"] = self._cut
        super()._start_asgi_task(cycle, answer)  # type: ignore[arg-type]

    def _begin_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _end_head(self) -> None:
        self._num_new_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the headers did not come within {HEAD_TIMEOUT_S:.0f} seconds")

    def _count_head(self, num_bytes: int) -> None:
        """Raises ValueError, which ends the parsing, for a head that is too large."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            raise ValueError("the head is too large")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the headers are larger than {_MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Says why the connection ends; not into an answer that is under way."""
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or running.response_started or not running.more_body:
                self._cut()
                return
            # Of its own body: this is its answer.
            running.disconnected = True
            running.message_event.set()
        error = (
            invalid(message)
            if status == 400
            else ApiError(status, "invalid_request_error", message)
        )
        body = to_json(error.body())
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Ends the connection, but reads on for a while.

        To close with something unread would be a reset, which costs the client the answer.
        """
        if self.transport.is_closing():
            return
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
        self._end_head()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self._await_silence()

    def _await_silence(self) -> None:
        if self.transport.can_write_eof():
            return
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._silence_timer = self.loop.call_later(_LINGER_SILENCE_S, self.transport.close)

    def _cut(self) -> None:
        self.transport.abort()
