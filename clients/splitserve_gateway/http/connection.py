"""HTTP/1.1 connections, with bounds on what one may cost before a request is known."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from splitserve_gateway.http.errors import ApiError, invalid

_MAX_HEAD_BYTES = 64 * 1024
# For all of a request's headers to come.
_HEAD_TIMEOUT_S = 30.0
# A peer that takes nothing for so long, not even the end of what was sent, is gone.
_UNACKNOWLEDGED_MS = 120_000
# What the kernel keeps for a client that does not read; left to itself it keeps MiB.
_SEND_BYTES = 128 * 1024
# Requests sent ahead on one connection while another is answered.
_MAX_PIPELINED = 16


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol, but for these.

    The head of a request is bounded in size and time. A client that leaves is noticed whichever of
    its pipelined requests is answered, since reading never stops: one that sends too much ahead is
    cut instead. What is no HTTP is refused in OpenAI's shape.

    `scope["state"]["cut"]()` ends the connection of a request at once.
    """

    _running: RequestResponseCycle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        plain = transport.get_extra_info("socket")
        if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        self.pipeline.clear()
        # Uvicorn tells the request that came last; the one that is answered may be another.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, f"the headers are larger than {_MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED:
            self._cut()
        elif self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.pipeline and self.flow.read_paused:
            self._cut()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        self._running = cycle
        cycle.scope["state"]["cut"] = self._cut
        super()._start_asgi_task(cycle, app)

    def _begin_head(self) -> None:
        self._is_in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._head_is_late)

    def _end_head(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the headers did not come within {_HEAD_TIMEOUT_S:.0f} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Says why the connection ends; not into an answer that is under way."""
        if self._running is not None and not self._running.response_complete:
            self._cut()
            return
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
        self.transport.close()

    def _cut(self) -> None:
        self.transport.abort()
