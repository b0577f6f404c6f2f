"""HTTP listener for Prometheus: `GET /metrics` at an address of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from splitserve_common import ANY, WebGuard, claim_address, is_loopback, split_hosts
from splitserve_metrics.instruments import Page
from splitserve_rpc import (
    HANDSHAKE_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_S,
    TlsFiles,
    check_exposure,
    https_context,
)

PATH = "/metrics"
# Maximum time from the connection of a reader to the end of the response.
_TIMEOUT_S = 10.0
# Further connections are refused. Enough for two Prometheus servers and a few manual readers.
MAX_CONNECTIONS = 16
_MAX_REQUEST_BYTES = 16 * 1024

_log = logging.getLogger(__name__)


class MetricsListener:
    """Answers with the current `page`. Slow readers and other requests are cut off.

    Supports only the HTTP that Prometheus uses: one request per connection. Refuses web pages of
    other origins, since readers need no credential.
    """

    def __init__(self, address: MetricsAddress, page: Callable[[], Page]) -> None:
        """`page`: called in the event loop. Raises FilesUnusable."""
        self._address = address.listen
        self._tls: dict[str, Any] = {}
        if address.tls is not None:
            self._tls = {
                "ssl": https_context(address.tls),
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
            }
        # TLS needs no check of the host: the certificate is valid only for names of this process.
        self._guard = WebGuard(address.allowed_hosts if address.tls is None else (ANY,))
        self._page = page
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Starts to listen; returns the address (`host:port`). Raises CannotListen."""
        address = claim_address(self._address)
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(
            self._connected, host.strip("[]"), int(port), limit=_MAX_REQUEST_BYTES, **self._tls
        )
        _log.info("metrics_served address=%s", address)
        return address

    async def close(self) -> None:
        """Closes the listener and all its connections."""
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
            # The reader is gone or too slow to get an error.
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
            return _response(
                HTTPStatus.NOT_FOUND, f"not found; available: {PATH}\n".encode(), has_body
            )
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"allowed: GET, HEAD\n", has_body)
        page = self._page()
        # Formatting thousands of numbers takes milliseconds, during which steps would wait.
        text = await asyncio.to_thread(generate_latest, page)
        return _response(HTTPStatus.OK, text, has_body)


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Returns the name, in lower case, and the value of a header field."""
    name, _, value = line.partition(b":")
    return name.strip().lower(), value


def _response(code: int, body: bytes, has_body: bool) -> bytes:
    """Returns an HTTP response. `has_body`: False for HEAD, which sends only the headers."""
    status = HTTPStatus(code)
    kind = CONTENT_TYPE_LATEST if status is HTTPStatus.OK else "text/plain; charset=utf-8"
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\nDate: {formatdate(usegmt=True)}\r\n{allow}"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")


# --------------------------------------------------------------------------------------------------
# Address at which the metrics of a process are read, checked before the process starts work.

_PROBLEM = "without --tls-cert, --tls-key and --tls-ca anyone can read them"


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Address of the metrics listener. `listen`: `host:port`.

    `tls`: TLS towards readers, who then need a certificate; None for plain text. `allowed_hosts`:
    further host names that readers may use with plain text.
    """

    listen: str
    tls: TlsFiles | None = None
    allowed_hosts: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> MetricsAddress | None:
        """Reads the address from the options of a process; None if metrics are off.

        Listens in plain text on loopback addresses, since users of this machine may read all
        metrics. Raises SecurityUnusable.
        """
        listen = values["metrics_listen"]
        if listen is None:
            return None
        paths = [values[name] for name in ("tls_cert", "tls_key", "tls_ca")]
        is_protected = all(paths)
        check_exposure(
            "metrics-listen",
            listen,
            is_protected=is_protected,
            insecure=values["insecure"],
            problem=_PROBLEM,
        )
        if is_loopback(listen) or not is_protected:
            return cls(listen, allowed_hosts=split_hosts(values.get("allowed_hosts")))
        return cls(listen, TlsFiles(*map(Path, paths)))
