"""HTTP servers: uvicorn with the gateway's connections, listeners and TLS."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp

from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.http import Connection, Exchanges, Listener, connection_places
from splitserve_rpc import TlsFiles, https_context

if TYPE_CHECKING:
    from splitserve_gateway.metrics import GatewayMetrics
    from splitserve_gateway.tracing import GatewayTraces

# Longer than clients keep idle connections, so that no request meets a connection being closed.
_KEEP_ALIVE_S = 75
_BACKLOG = 4096
# Connections of one address per request that may be answered at a time: clients keep idle ones.
_NUM_CONNECTIONS = 2


class HttpServer(uvicorn.Server):
    """Uvicorn server at `address`. Leaves signals to the process that runs it.

    `http_tls`: TLS context of connections; None for plain text. `places`: shares of connections.
    `is_listening`: set once the server listens. Set `should_exit` to stop it.
    """

    def __init__(
        self, app: ASGIApp, address: str, tls: TlsFiles | None, most_of_an_address: int
    ) -> None:
        """Prepares the server. `most_of_an_address`: bound on connections of one address.

        Raises FilesUnusable.
        """
        self.http_tls = None if tls is None else https_context(tls)
        self.places = connection_places(most_of_an_address)
        self.is_listening = asyncio.Event()
        host, _, port = address.rpartition(":")
        super().__init__(
            uvicorn.Config(
                app,
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
        """Starts listeners that bound connections and TLS handshakes, which uvicorn's do not."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(1)
        listening = sockets or _listening(str(self.config.host), self.config.port)
        listeners = [
            Listener(each, lambda: self.places, self._connection, self.http_tls)
            for each in listening
        ]
        # Listener has all methods of `asyncio.Server` that uvicorn calls.
        self.servers = cast(list[asyncio.Server], listeners)
        self.started = True
        self.is_listening.set()

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)


class Server(HttpServer):
    """HTTP server of the API. `exchanges`: open requests, to be drained before the server stops."""

    def __init__(
        self,
        config: GatewayConfig,
        address: str,
        metrics: GatewayMetrics | None = None,
        traces: GatewayTraces | None = None,
    ) -> None:
        """Builds the application and prepares the server. Raises FilesUnusable."""
        self.app = build_app(config, metrics=metrics, traces=traces)
        self.exchanges: Exchanges = self.app.state.exchanges
        most_of_an_address = _NUM_CONNECTIONS * config.max_concurrent_requests
        super().__init__(self.app, address, config.http_tls, most_of_an_address)


def _listening(host: str, port: int) -> list[socket.socket]:
    """Opens a listening socket for each address of `host`. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    targets = {(family, target) for family, *_, target in found}
    return [
        socket.create_server(target[:2], family=family, backlog=_BACKLOG)
        for family, target in targets
    ]
