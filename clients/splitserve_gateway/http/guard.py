"""Stands before every endpoint: how many requests are taken, and how they end at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve_gateway.http.bodies import NEEDS_CONTENT_TYPE
from splitserve_gateway.http.errors import ApiError, draining, too_many_requests, web_refused
from splitserve_gateway.http.exchange import Answered, Exchange
from splitserve_gateway.tracing import GatewayTraces
from splitserve_rpc.web_guard import WebGuard

_HEALTH = frozenset(("/health", "/health/live", "/health/ready"))


def is_about_health(path: str) -> bool:
    """Whether it is answered whatever happens, and to whom it may be."""
    return path in _HEALTH


class Exchanges:
    """The requests that are being answered.

    `max_open`: None where callers are known, who have places by their tenants.
    """

    def __init__(
        self,
        max_open: int | None,
        timeout_s: float,
        answered: Callable[[Answered], None] | None = None,
        traces: GatewayTraces | None = None,
    ) -> None:
        """`answered`: is told of each when it is over. `traces`: None where nobody has any."""
        self.answered = answered
        self.traces = traces
        self.timeout_s = timeout_s
        self.is_draining = False
        self._max_open = max_open
        self._open: set[Exchange] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_open(self) -> int:
        """How many."""
        return len(self._open)

    def refusal(self) -> ApiError | None:
        """Why no further request is taken now."""
        if self.is_draining:
            return draining()
        if self._max_open is None or len(self._open) < self._max_open:
            return None
        return too_many_requests(f"the gateway answers {self._max_open} requests already")

    def add(self, exchange: Exchange) -> None:
        """One more."""
        self._open.add(exchange)
        self._is_empty.clear()

    def remove(self, exchange: Exchange) -> None:
        """It is over."""
        self._open.discard(exchange)
        if not self._open:
            self._is_empty.set()

    async def drain(self, timeout_s: float) -> None:
        """Takes no more, and returns when all are over; what is not after `timeout_s` is ended."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            self.end_all()
            await self._is_empty.wait()

    def end_all(self) -> None:
        """Ends all at once."""
        for exchange in list(self._open):
            exchange.end(draining())


class Guard:
    """The ASGI application around the application."""

    def __init__(self, app: ASGIApp, exchanges: Exchanges, web: WebGuard | None = None) -> None:
        """`web`: None where all callers need a credential."""
        self._app = app
        self._exchanges = exchanges
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; passes on what is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_health = is_about_health(scope["path"])
        trace = None
        if self._exchanges.traces is not None and not is_health:
            trace = self._exchanges.traces.begin(scope)
        exchange = Exchange(scope, receive, send, trace)
        refusal = self._refusal(scope)
        try:
            if refusal is not None:
                await exchange.fail(refusal)
            else:
                await self._run(exchange)
        finally:
            answered = exchange.over()
            if self._exchanges.answered is not None:
                self._exchanges.answered(answered)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._web is not None:
            scope.setdefault("state", {})[NEEDS_CONTENT_TYPE] = True
            found = self._web.refusal(scope["method"], scope["headers"])
            if found is not None:
                return web_refused(found)
        return None if is_about_health(scope["path"]) else self._exchanges.refusal()

    async def _run(self, exchange: Exchange) -> None:
        self._exchanges.add(exchange)
        try:
            await exchange.run(self._app, self._exchanges.timeout_s)
        finally:
            self._exchanges.remove(exchange)
