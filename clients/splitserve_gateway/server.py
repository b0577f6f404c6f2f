"""The HTTP server around the application."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.http import tls
from splitserve_gateway.http.connection import Connection
from splitserve_gateway.http.guard import Exchanges

# Longer than clients keep an idle connection, so that none sends a request into one being closed.
_KEEP_ALIVE_S = 75
_BACKLOG = 4096
# Of each request that may be answered at a time: clients keep some that they do not use just now.
_NUM_CONNECTIONS = 2


class Server(uvicorn.Server):
    """Uvicorn as the gateway wants it, at `address`; signals are left to whoever runs it.

    `exchanges`: what it is answering. `http_tls`: what connections are met with, None: with plain
    text. `max_connections`: open at a time, without those in a handshake of TLS, which has a
    timeout. Set `should_exit` to end it, after they were drained.
    """

    def __init__(self, config: GatewayConfig, address: str) -> None:
        """Raises FilesUnusable."""
        self.app = build_app(config)
        self.exchanges: Exchanges = self.app.state.exchanges
        self.http_tls = None if config.http_tls is None else tls.https_context(config.http_tls)
        self.max_connections = _NUM_CONNECTIONS * config.max_concurrent_requests
        host, _, port = address.rpartition(":")
        super().__init__(
            uvicorn.Config(
                self.app,
                host=host.strip("[]"),
                port=int(port),
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's own has no bounds for what TLS may take."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(1)
        where: Sequence[dict[str, Any]] = [{"sock": each} for each in sockets or ()]
        where = where or [{"host": self.config.host, "port": self.config.port}]
        loop = asyncio.get_running_loop()
        bounds = _bounds(self.http_tls)
        self.servers = [
            await loop.create_server(
                self._connection, **each, ssl=self.http_tls, backlog=_BACKLOG, **bounds
            )
            for each in where
        ]
        self.started = True

    def _connection(self) -> Connection:
        made = Connection(self.config, self.server_state, self.lifespan.state)
        made.max_connections = self.max_connections
        return made


def _bounds(context: ssl.SSLContext | None) -> dict[str, Any]:
    """In seconds; they may not be given without TLS."""
    if context is None:
        return {}
    return {
        "ssl_handshake_timeout": tls.HANDSHAKE_TIMEOUT_S,
        "ssl_shutdown_timeout": tls.SHUTDOWN_TIMEOUT_S,
    }
