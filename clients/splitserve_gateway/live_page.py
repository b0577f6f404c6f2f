"""Live page of the gateway, served at a separate address."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from starlette.requests import Request

from splitserve_client import ClientConfig
from splitserve_common import claim_address, discovery
from splitserve_contract import DomainError
from splitserve_gateway.callers import KnownCallers
from splitserve_gateway.config import GatewayConfig, LiveConfig
from splitserve_gateway.http import ApiError, origin_of
from splitserve_gateway.server import HttpServer
from splitserve_live import MAX_FEEDS, Feeds
from splitserve_live.server import build_page

_NUM_CONNECTIONS = 4 * MAX_FEEDS
_UNAUTHORIZED, _FORBIDDEN = 401, 403

_log = logging.getLogger(__name__)


class LivePage:
    """Serves the live page from `start` to `close`."""

    def __init__(
        self, config: GatewayConfig, live: LiveConfig, callers: Callable[[], KnownCallers]
    ) -> None:
        """Claims the address of the page. `callers`: checks credentials where callers are known.

        Raises FilesUnusable and CannotListen.
        """
        self._listening = None if live.socket is None else [socket.socket(fileno=live.socket)]
        self._address = live.listen if self._listening else claim_address(live.listen)
        knows_callers = config.gateway_key_file is not None
        self._feeds = Feeds(discovery(live.schedulers), ClientConfig(tls=config.scheduler_tls))
        page = build_page(
            self._feeds,
            hosts=config.hosts(self._address),
            check=partial(_check, callers) if knows_callers else None,
        )
        self._server = HttpServer(page, self._address, config.http_tls, _NUM_CONNECTIONS)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts serving in a background task."""
        self._serving = asyncio.create_task(self._server.serve(self._listening))
        _log.info("live_page_served address=%s", self._address)

    async def is_listening(self) -> None:
        """Waits until the server listens."""
        await self._server.is_listening.wait()

    async def close(self) -> None:
        """Ends open feeds, and stops the server."""
        self._feeds.close()
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


async def _check(callers: Callable[[], KnownCallers], request: Request, credential: str) -> None:
    """Checks an operator's credential. Raises DomainError for any other credential."""
    if not credential:
        raise DomainError("CALLER_UNKNOWN", "no credential was given")
    try:
        caller = await callers().identify(credential, origin_of(request.scope.get("client")))
    except ApiError as error:
        reasons = {_UNAUTHORIZED: "CALLER_UNKNOWN", _FORBIDDEN: "CALLER_NOT_ALLOWED"}
        reason = reasons.get(error.status, "EXECUTOR_UNREACHABLE")
        raise DomainError(reason, error.message) from error
    if not caller.may_operate:
        message = "the credential lacks the scope `operator`"
        raise DomainError("CALLER_NOT_ALLOWED", message)
