"""HTTP/1.1 connections with bounds on cost before a request is known."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from splitserve_gateway.http.errors import ApiError, invalid
from splitserve_gateway.http.request_parser import HeadRefused, RequestParser, check_head

_MAX_HEAD_BYTES = 64 * 1024
_MAX_TARGET_BYTES = 16 * 1024
# Bytes of a header besides name and value: a colon, a space, the end of the line.
_HEADER_EXTRA_BYTES = 4
# Time for all headers of a request to arrive.
HEAD_TIMEOUT_S = 30.0
# Time for a client that still sends to read the answer and the end of the connection.
LINGER_S = 5.0
# TLS connections cannot be half closed: they end after this time without new data.
_LINGER_SILENCE_S = 0.5
# A peer that acknowledges no data for this long is gone.
_UNACKNOWLEDGED_MS = 120_000
# Kernel send buffer for a client that does not read; the default is several MiB.
_SEND_BYTES = 128 * 1024
_UNWRITTEN_BYTES = 64 * 1024
# Requests sent ahead on one connection while another is answered.
_MAX_PIPELINED = 16
# Methods whose answers start at once, and may go unread without loss.
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Connection(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with bounds and stricter rules.

    The size and the arrival time of a request head are bounded, and so is data after a body. The
    end of a client is noticed whichever of its pipelined requests is answered, since reading never
    stops; a client that sends too much ahead is cut. Data that is not HTTP is refused in OpenAI's
    format, after the answers to earlier requests. An answer that does not wait for the whole body
    is the connection's last. Trailers are dropped. HEAD is answered as GET, without the body.
    Clients of HTTP/1.0 get no chunks, and may keep the connection.

    `leave` is called at the end of a connection that was made.

    `scope["state"]["cut"]()` aborts the connection of a request.
    """

    leave: Callable[[], None]
    is_made = False
    _running: RequestResponseCycle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _silence_timer: asyncio.TimerHandle | None = None
    # Bytes of the head parsed so far, and bytes received since the last part of a body. The latter
    # includes bytes that are not parsed yet.
    _num_head_bytes = 0
    _num_new_bytes = 0
    _is_last = False
    _is_in_head = False
    # Refusal to send after pending answers; data after it is not read.
    _last_refusal: HeadRefused | None = None
    _has_eof = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.is_made = True
        super().connection_made(transport)
        # The default over TLS is larger; the kernel's buffer adds to it.
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
        # Uvicorn notifies the latest request; the request being answered may be another.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._await_silence()
            return
        if self._last_refusal is not None:
            return
        self._num_new_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
            if self._num_new_bytes > _MAX_HEAD_BYTES:
                raise _head_too_large()
        except HeadRefused as refusal:
            self._refuse(refusal)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection if all open answers start at once; else it closes."""
        cycles = [cycle for cycle, _ in self.pipeline]
        if self._running is not None and not self._running.response_complete:
            cycles.append(self._running)
        self._has_eof = bool(cycles) and all(
            cycle.scope["method"] in _SAFE_METHODS and not cycle.more_body for cycle in cycles
        )
        return self._has_eof

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._is_in_head = True
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _MAX_TARGET_BYTES:
            message = f"the target is longer than {_MAX_TARGET_BYTES} bytes"
            raise HeadRefused(HTTPStatus.REQUEST_URI_TOO_LONG, message)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _HEADER_EXTRA_BYTES)
        if self._is_in_head:
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._end_head()
        self._is_in_head = False
        version, method = self.parser.get_http_version(), self.parser.get_method().decode()
        is_tls = self.scheme == "https"
        self.url = check_head(version, method, self.url, self.headers, is_tls)
        if version == "1.0":
            self.expect_100_continue = False
        super().on_headers_complete()
        self.cycle.keep_alive = self.parser.should_keep_alive()
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

    def on_response_complete(self) -> None:
        if self._is_last:
            self._linger()
            return
        has_more = bool(self.pipeline)
        super().on_response_complete()
        if has_more or self.transport.is_closing():
            return
        if self._last_refusal is not None:
            self._write_refusal(self._last_refusal)
        elif self._has_eof:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        writer = _AnswerWriter(cycle)
        is_head = cycle.scope["method"] == "HEAD"

        async def answer(scope: Scope, receive: Receive, _: Send) -> None:
            await app({**scope, "method": "GET"} if is_head else scope, receive, send)

        async def send(message: Message) -> None:
            await writer.send(message)
            if writer.is_early and not cycle.disconnected:
                # Ends the connection by lingering instead of uvicorn's close.
                self._is_last = cycle.keep_alive = True
            if is_head:
                await writer.end()

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
            message = f"the headers did not arrive within {HEAD_TIMEOUT_S:.0f} seconds"
            self._refuse(HeadRefused(HTTPStatus.REQUEST_TIMEOUT, message))

    def _count_head(self, num_bytes: int) -> None:
        """Counts bytes of the head.

        Raises HeadRefused, which ends parsing, for a head that is too large.
        """
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            raise _head_too_large()

    def _refuse(self, refusal: HeadRefused) -> None:
        """Sends the refusal and ends the connection, after the answers to earlier requests."""
        running = self._running
        if running is None or running.response_complete:
            self._write_refusal(refusal)
        elif running is not self.cycle or not running.more_body:
            if self.pipeline and self.cycle.more_body:
                # The refusal is the answer to the request with the invalid body.
                self.pipeline.popleft()
            self._last_refusal = refusal
            self._end_head()
        elif running.response_started:
            self._cut()
        else:
            # The running request's own body is invalid: the refusal is its answer.
            running.disconnected = True
            running.message_event.set()
            self._write_refusal(refusal)

    def _write_refusal(self, refusal: HeadRefused) -> None:
        status = HTTPStatus(refusal.status)
        error = (
            invalid(refusal.message)
            if status is HTTPStatus.BAD_REQUEST
            else ApiError(status, "invalid_request_error", refusal.message)
        )
        body = to_json(error.body())
        head = (
            f"HTTP/1.1 {status} {status.phrase}\r\ndate: {formatdate(usegmt=True)}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Closes the sending side, and keeps reading for a while.

        Closing with unread data would reset the connection and cost the client the answer.
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


class _AnswerWriter:
    """Writes one answer in the form that the request's method and HTTP version need.

    `is_early`: the answer began before the whole request body had arrived.
    """

    is_early = False

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        # False: the end of the connection marks the end of the body.
        self._has_length = True

    async def send(self, message: Message) -> None:
        """Writes `message`; drops messages after the end of the answer."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            message = {**message, "headers": self._headers(message)}
        elif cycle.response_complete:
            return
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)  # type: ignore[arg-type]

    async def end(self) -> None:
        """Ends an answer without a body."""
        if not self._cycle.response_complete:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _headers(self, message: Message) -> list[tuple[bytes, bytes]]:
        cycle = self._cycle
        headers = list(message.get("headers", ()))
        self.is_early = cycle.more_body
        if self.is_early:
            headers.append((b"connection", b"close"))
        if cycle.scope["http_version"] == "1.0":
            self._has_length = _has_length(cycle.scope["method"], message["status"], headers)
            if not self._has_length:
                cycle.keep_alive = cycle.chunked_encoding = False
            elif cycle.keep_alive and not self.is_early:
                headers.append((b"connection", b"keep-alive"))
        return headers


def _head_too_large() -> HeadRefused:
    message = f"the headers are larger than {_MAX_HEAD_BYTES} bytes"
    return HeadRefused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)


def _has_length(method: str, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Returns whether the head tells a client where the answer ends."""
    if method == "HEAD" or status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        return True
    return any(name.lower() == b"content-length" for name, _ in headers)
