"""Where Prometheus reads: `GET /metrics`, at an address of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from splitserve_metrics.address import MetricsAddress
from splitserve_metrics.instruments import Page
from splitserve_rpc.addresses import claim_address
from splitserve_rpc.https import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, https_context

PATH = "/metrics"
# Of one who reads, from its connection to the end of its answer.
_TIMEOUT_S = 10.0
# Beyond them nobody is taken: a Prometheus or two, and somebody with curl.
MAX_CONNECTIONS = 16
_MAX_REQUEST_BYTES = 16 * 1024

_log = logging.getLogger(__name__)


class MetricsListener:
    """Answers with the `page` of the moment. Whoever is slow or says something else is cut off.

    It knows nothing of HTTP but how Prometheus asks: one request for each connection.
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
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != PATH.encode():
            return _response("404 Not Found", f"there is only {PATH}\n".encode())
        if method != b"GET":
            return _response("405 Method Not Allowed", b"there is only GET\n")
        page = self._page()
        # Text of thousands of numbers takes milliseconds, which steps would wait for.
        return _response("200 OK", await asyncio.to_thread(generate_latest, page))


def _response(status: str, body: bytes) -> bytes:
    kind = CONTENT_TYPE_LATEST if status.startswith("200") else "text/plain; charset=utf-8"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    )
    return head.encode() + body
