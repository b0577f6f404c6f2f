"""Admission of HTTP requests: bound on open requests, refusals, drain at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve_common import WebGuard
from splitserve_gateway.http.bodies import NEEDS_CONTENT_TYPE
from splitserve_gateway.http.errors import ApiError, draining, too_many_requests, web_refused
from splitserve_gateway.http.exchange import EndedExchange, Exchange
from splitserve_gateway.tracing import GatewayTraces

_HEALTH = frozenset(("/health", "/health/live", "/health/ready"))
_FOR_OPERATORS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))


def is_about_health(path: str) -> bool:
    """Returns whether `path` is a health check, which is answered always and to every client."""
    return path in _HEALTH


def is_for_operators(path: str) -> bool:
    """Returns whether a credential needs the scope `operator` for `path`, instead of `generate`."""
    return path in _FOR_OPERATORS


class Exchanges:
    """Open requests, and the rule for taking more.

    `max_open`: None if callers are known; then TenantConcurrency bounds requests.
    """

    def __init__(
        self,
        max_open: int | None,
        timeout_s: float,
        answered: Callable[[EndedExchange], None] | None = None,
        traces: GatewayTraces | None = None,
    ) -> None:
        """Starts without open requests.

        `answered`: called with each ended request. `traces`: None if tracing is off.
        """
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
        """Number of open requests."""
        return len(self._open)

    def refusal(self) -> ApiError | None:
        """Returns the refusal of a new request while draining or full; None to accept it."""
        if self.is_draining:
            return draining()
        if self._max_open is None or len(self._open) < self._max_open:
            return None
        return too_many_requests(f"the gateway already has {self._max_open} open requests")

    def add(self, exchange: Exchange) -> None:
        """Adds an open request."""
        self._open.add(exchange)
        self._is_empty.clear()

    def remove(self, exchange: Exchange) -> None:
        """Removes an ended request."""
        self._open.discard(exchange)
        if not self._open:
            self._is_empty.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, and waits for open ones.

        Ends those still open after `timeout_s`.
        """
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            self.end_all()
            await self._is_empty.wait()

    def end_all(self) -> None:
        """Ends all open requests with the error `draining`."""
        for exchange in list(self._open):
            exchange.end(draining())


class Guard:
    """Outermost ASGI middleware: refuses, times, traces and tracks requests."""

    def __init__(self, app: ASGIApp, exchanges: Exchanges, web: WebGuard | None = None) -> None:
        """Wraps `app`. `web`: None if all callers need a credential."""
        self._app = app
        self._exchanges = exchanges
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request; passes on other scopes, such as the lifespan."""
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
