"""Live page as an ASGI application: its static files, and the frames that it draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from http import HTTPStatus
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve_client import CallerNotAllowed, CallerUnknown, SplitserveError
from splitserve_common import WebGuard
from splitserve_contract import DomainError
from splitserve_live.feeds import Feeds
from splitserve_rpc import is_credential, split_bearer

_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; "
     b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)  # fmt: skip
_NDJSON = "application/x-ndjson"
_DEFAULT_RATE = 10
# Seconds without reading after which a viewer loses its place to other viewers.
_UNREAD_S = 30.0

# Raises DomainError(CALLER_UNKNOWN or CALLER_NOT_ALLOWED), or UNAVAILABLE reasons.
Check = Callable[[Request, str], Awaitable[None]]


def build_page(
    feeds: Feeds,
    hosts: Sequence[str] | None,
    check: Check | None = None,
    unread_s: float = _UNREAD_S,
) -> ASGIApp:
    """Builds the application around `feeds`.

    `hosts`: host names of the page, as for a WebGuard; None if all callers need a credential, so
    that no web page has to be refused. `check`: checks that a credential may watch; None leaves the
    check to the schedulers. `unread_s`: time that a line may wait for its reader.
    """
    page = _Page(feeds, check, unread_s)
    static = Path(str(resources.files("splitserve_live") / "static"))
    middleware = [Middleware(_Headers)]
    if hosts is not None:
        middleware.append(Middleware(_Guarded, guard=WebGuard(hosts)))
    return Starlette(
        routes=[
            Route("/feed", page.feed),
            Route("/life", page.life),
            Route("/schedulers", page.schedulers),
            Mount("/", StaticFiles(directory=static, html=True)),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _on_http_error},
    )


class _Page:
    """Endpoints that the page calls."""

    def __init__(self, feeds: Feeds, check: Check | None, unread_s: float) -> None:
        self._feeds = feeds
        self._check = check
        self._unread_s = unread_s

    async def schedulers(self, request: Request) -> Response:
        """Returns the addresses of the schedulers; refuses viewers without a needed credential."""
        try:
            await self._may_watch(request)
            return JSONResponse({"schedulers": await self._feeds.addresses()})
        except (DomainError, OSError) as error:
            return _refusal(error)

    async def feed(self, request: Request) -> Response:
        """Streams frames until the viewer leaves."""
        stack = AsyncExitStack()
        try:
            credential = await self._may_watch(request)
            rate = _rate(request.query_params.get("rate"))
            scheduler = request.query_params.get("scheduler", "")
            opened = self._feeds.open(scheduler, credential, rate)
            lines = await stack.enter_async_context(opened)
        except (SplitserveError, DomainError, OSError, LookupError) as error:
            return _refusal(error)
        return _FeedResponse(stack, lines, self._unread_s)

    async def life(self, request: Request) -> Response:
        """Returns the recorded history of a request."""
        query = request.query_params
        try:
            credential = await self._may_watch(request)
            scheduler, request_id = query.get("scheduler", ""), query.get("request", "")
            return JSONResponse(await self._feeds.life(scheduler, credential, request_id))
        except (SplitserveError, DomainError, OSError, LookupError) as error:
            return _refusal(error)

    async def _may_watch(self, request: Request) -> str:
        """Returns the viewer's credential, empty for none. Raises DomainError."""
        credential = split_bearer(request.headers.get("authorization", "")) or ""
        if credential and not is_credential(credential):
            raise DomainError("CALLER_UNKNOWN", "the credential is malformed")
        if self._check is not None:
            await self._check(request, credential)
        return credential


class _FeedResponse(StreamingResponse):
    """Streams the lines of a feed and closes the feed at the end; cuts off idle viewers."""

    def __init__(self, stack: AsyncExitStack, lines: AsyncIterator[bytes], unread_s: float) -> None:
        super().__init__(_until_broken(lines), media_type=_NDJSON)
        self._stack = stack
        self._unread_s = unread_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._unread_s):
                await send(message)

        async with self._stack:
            try:
                await super().__call__(scope, receive, send_in_time)
            except (TimeoutError, ClientDisconnect):
                cut = scope.get("state", {}).get("cut")
                if cut is None:
                    raise
                cut()
                # The server must notice the cut before this request ends.
                while (await receive())["type"] != "http.disconnect":
                    pass


async def _until_broken(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields lines until the feed breaks; the page then reconnects and gets the reason."""
    with suppress(SplitserveError):
        async for line in lines:
            yield line


def _rate(text: str | None) -> int:
    """Parses the frame rate. Raises DomainError."""
    if text is None:
        return _DEFAULT_RATE
    if not (text.isascii() and text.isdigit() and len(text) < 3):
        raise DomainError("WATCH_RATE_INVALID", f"rate is {text[:20]!r}; allowed: 1 to 10")
    return int(text)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answers errors of routing, and OPTIONS: the page offers GET and HEAD only."""
    assert isinstance(error, HTTPException), "registered for it"
    is_for_all = request.method == "OPTIONS" and request.scope["path"] == "*"
    headers = {}
    if is_for_all or error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"allow": "GET, HEAD"}
        if request.method == "OPTIONS":
            return Response(None, HTTPStatus.NO_CONTENT, headers)
    content = {"reason": "", "message": error.detail}
    return JSONResponse(content, error.status_code, headers)


_STATUS = {
    "CALLER_UNKNOWN": 401,
    "CALLER_NOT_ALLOWED": 403,
    "WATCH_RATE_INVALID": 400,
    "TOO_MANY_WATCHERS": 429,
}


def _refusal(error: SplitserveError | DomainError | OSError | LookupError) -> Response:
    if isinstance(error, OSError | LookupError):
        status = 503 if isinstance(error, OSError) else 404
        return JSONResponse({"reason": "", "message": str(error)}, status)
    reason, message = error.reason, str(getattr(error, "message", error))
    if isinstance(error, CallerUnknown):
        reason = "CALLER_UNKNOWN"
    elif isinstance(error, CallerNotAllowed):
        reason = "CALLER_NOT_ALLOWED"
    elif reason == "METHOD_UNKNOWN":
        message += "; --live-schedulers must give the addresses for operators"
    return JSONResponse({"reason": reason, "message": message}, _STATUS.get(reason, 503))


class _Guarded:
    """Middleware that answers only requests that the guard permits."""

    def __init__(self, app: ASGIApp, guard: WebGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on permitted requests; refuses others."""
        if scope["type"] == "http":
            refusal = self._guard.refusal(scope["method"], scope["headers"])
            if refusal is not None:
                content = {"reason": "", "message": refusal.message}
                await JSONResponse(content, refusal.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Headers:
    """Middleware that adds security headers for browsers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on every request, and adds the headers to its response."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self._app(scope, receive, with_headers)
