"""The HTTP server around the application."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.http.connection import Connection
from splitserve_gateway.http.guard import Exchanges

# Longer than clients keep an idle connection, so that none sends a request into one being closed.
_KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """Uvicorn as the gateway wants it, at `address`; signals are left to whoever runs it.

    `exchanges`: what it is answering. Set `should_exit` to end it, after they were drained.
    """

    def __init__(self, config: GatewayConfig, address: str) -> None:
        self.app = build_app(config)
        self.exchanges: Exchanges = self.app.state.exchanges
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
                backlog=4096,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
