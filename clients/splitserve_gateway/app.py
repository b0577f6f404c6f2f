"""ASGI application of the gateway: routes, middlewares, and connections to schedulers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib import metadata
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from splitserve_client import ClientConfig, UnreadBudget
from splitserve_common import WebGuard, discovery, log_context
from splitserve_gateway.callers import CredentialGate, KnownCallers, TenantConcurrency, identify
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.endpoints import (
    Gateway,
    adapters,
    chat,
    completions,
    docs_page,
    messages,
    models,
    openapi_of,
    ranking,
    responses,
    transcriptions,
    vectors,
)
from splitserve_gateway.grammars import GrammarChecker
from splitserve_gateway.http import (
    ApiError,
    BodyBudget,
    ErrorFormat,
    Exchanges,
    Guard,
    invalid,
    quoted,
)
from splitserve_gateway.sharing import FairSemaphore, Shares
from splitserve_gateway.upstreams import ChatRules, Fleet

if TYPE_CHECKING:
    from splitserve_gateway.metrics import GatewayMetrics
    from splitserve_gateway.tracing import GatewayTraces

_ROUTERS = (
    chat.router,
    responses.router,
    messages.router,
    completions.router,
    transcriptions.router,
    models.router,
    adapters.router,
    vectors.router,
    ranking.router,
)

# Budget of body bytes, in bodies of the largest size that are read or encoded at a time.
_NUM_BODIES = 16
# Equal to the threads of a tokenizer, so that turns of tenants decide the order.
_NUM_TOKENIZING = 3
# Files of audio that are decoded at a time.
_NUM_DECODING = 2
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}


def build_app(
    config: GatewayConfig,
    client_config: ClientConfig | None = None,
    metrics: GatewayMetrics | None = None,
    traces: GatewayTraces | None = None,
) -> FastAPI:
    """Builds the application, which connects to the schedulers of `config` while it runs.

    `client_config`: timeouts and retries; identity comes from `config`. `metrics`, `traces`: None
    if off. Raises CredentialsUnusable, and FilesUnusable for a file of schedulers.
    `app.state.exchanges`: open requests. `app.state.gateway`: the gateway's parts, once it runs.
    """
    to_schedulers = _to_schedulers(config, client_config or ClientConfig())
    schedulers, operators = discovery(config.schedulers), discovery(config.operator_schedulers)
    knows_callers = config.gateway_key_file is not None
    max_requests = config.max_concurrent_requests
    exchanges = Exchanges(
        None if knows_callers else max_requests,
        config.request_timeout_s,
        None if metrics is None else metrics.answered,
        traces,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        checker = GrammarChecker()
        unread = UnreadBudget(config.max_unread_bytes)
        bodies = BodyBudget(_NUM_BODIES * config.max_body_bytes)
        tokenizing = FairSemaphore(_NUM_TOKENIZING, max_requests)
        decoding = FairSemaphore(_NUM_DECODING, max_requests)
        try:
            chats = ChatRules(config.chat_template, config.tool_call_parser == "auto")
            async with Fleet(schedulers, unread, to_schedulers, chats=chats) as fleet:
                app.state.callers = KnownCallers(partial(identify, fleet), time.monotonic)
                app.state.gateway = Gateway(
                    config, fleet, exchanges, checker, bodies, tokenizing, decoding, operators
                )
                if metrics is not None:
                    metrics.watch(fleet, exchanges)
                yield
        finally:
            await checker.close()

    app = FastAPI(
        title="splitserve",
        version=metadata.version("splitserve"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.exchanges = exchanges
    for router in _ROUTERS:
        app.include_router(router)
    app.add_route("/docs", docs_page, include_in_schema=False)
    app.openapi = openapi_of(app, knows_callers=knows_callers)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    if knows_callers:
        app.add_middleware(TenantConcurrency, places=Shares(max_requests))
        app.add_middleware(CredentialGate, callers=lambda: app.state.callers)
    hosts = config.hosts(config.http)
    web = None if hosts is None else WebGuard(hosts, config.http_cors_origins)
    app.add_middleware(Guard, exchanges=exchanges, web=web)
    if config.http_cors_origins:
        # Outermost, so that web pages can read every refusal, too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.http_cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(
                "x-request-id",
                "request-id",
                "retry-after",
                "x-splitserve-ignored-fields",
            ),
        )
    return app


def _to_schedulers(config: GatewayConfig, patience: ClientConfig) -> ClientConfig:
    """Returns the client configuration for schedulers. Raises CredentialsUnusable."""
    made = replace(patience, tls=config.scheduler_tls, api_key_file=config.gateway_key_file)
    made.check()
    return made


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    headers = dict(error.headers or {})
    is_for_all = request.method == "OPTIONS" and request.scope["path"] == "*"
    if is_for_all or error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        methods = {"GET", "POST"} if is_for_all else set(headers["Allow"].split(", "))
        headers = {"allow": ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))}
        if request.method == "OPTIONS":
            return Response(None, HTTPStatus.NO_CONTENT, headers)
    message = f"{request.method} {quoted(request.scope['path'])}: {error.detail}"
    code = _CODE_OF_STATUS.get(error.status_code)
    refused = ApiError(error.status_code, "invalid_request_error", message, code=code)
    response = _response(request, refused)
    response.headers.update(headers)
    return response


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for it"
    first = error.errors()[0]
    refused = invalid(str(first["msg"]), str(first["loc"][-1]), "invalid_value")
    return _response(request, refused)


def _response(request: Request, error: ApiError) -> Response:
    context = log_context.get()
    request_id = "" if context is None else context.request_id
    return error.response(ErrorFormat.of(request.scope["path"]), request_id)
