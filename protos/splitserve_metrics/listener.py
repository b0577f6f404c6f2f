"""Where Prometheus reads: `GET /metrics`, at an address of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from splitserve_metrics.address import MetricsAddress
from splitserve_metrics.instruments import Page
from splitserve_rpc.addresses import claim_address
from splitserve_rpc.https import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, https_context
from splitserve_rpc.web_guard import ANY, WebGuard

PATH = "/metrics"
# Of one who reads, from its connection to the end of its answer.
_TIMEOUT_S = 10.0
# Beyond them nobody is taken: a Prometheus or two, and somebody with curl.
MAX_CONNECTIONS = 16
_MAX_REQUEST_BYTES = 16 * 1024

_log = logging.getLogger(__name__)


class MetricsListener:
    """Answers with the `page` of the moment. Whoever is slow or says something else is cut off.

    It knows nothing of HTTP but how Prometheus asks: one request for each connection. Web pages of
    other origins are refused, since nobody is asked for a credential.
    """

    def __init__(self, address: MetricsAddress, page: Callable[[], Page]) -> None:
        """`page` is called in the event loop. Raises FilesUnusable."""
        self._address = address.listen
        self._tls: dict[str, Any] = {}
        if address.tls is not None:
            self._tls = {
                "ssl": https_context(address.tls),
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
            }
        # Over TLS the host needs no check: the certificate is valid for our own names alone.
        self._guard = WebGuard(address.allowed_hosts if address.tls is None else (ANY,))
        self._page = page
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listens from now on; returns where. Raises CannotListen."""
        address = claim_address(self._address)
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(
            self._connected, host.strip("[]"), int(port), limit=_MAX_REQUEST_BYTES, **self._tls
        )
        _log.info("metrics_served address=%s", address)
        return address

    async def close(self) -> None:
        """Answers nobody any more."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # Nobody is there to be told.
            pass
        finally:
            with suppress(OSError):
                writer.transport.abort()

    async def _answer(self, head: bytes) -> bytes:
        request_line, *lines = head.split(b"\r\n")
        method, _, rest = request_line.partition(b" ")
        has_body = method != b"HEAD"
        refusal = self._guard.refusal(method.decode("latin-1"), map(_field, lines))
        if refusal is not None:
            return _response(refusal.status, f"{refusal.message}\n".encode(), has_body)
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != PATH.encode():
            return _response(HTTPStatus.NOT_FOUND, f"there is only {PATH}\n".encode(), has_body)
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"there is only GET\n", has_body)
        page = self._page()
        # Text of thousands of numbers takes milliseconds, which steps would wait for.
        text = await asyncio.to_thread(generate_latest, page)
        return _response(HTTPStatus.OK, text, has_body)


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Name, in small letters, and value of a header field."""
    name, _, value = line.partition(b":")
    return name.strip().lower(), value


def _response(code: int, body: bytes, has_body: bool) -> bytes:
    """`has_body`: whether `body` is sent, or only described."""
    status = HTTPStatus(code)
    kind = CONTENT_TYPE_LATEST if status is HTTPStatus.OK else "text/plain; charset=utf-8"
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\nDate: {formatdate(usegmt=True)}\r\n{allow}"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")
