"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from splitserve_client import ClientConfig, SplitserveError
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.endpoints import chat, completions, health, models, responses, tokenization
from splitserve_gateway.endpoints.context import Gateway
from splitserve_gateway.endpoints.openapi import openapi_of
from splitserve_gateway.grammars.checker import GrammarChecker
from splitserve_gateway.http.errors import ApiError, api_error
from splitserve_gateway.upstreams.fleet import Fleet

_ROUTERS = (
    chat.router,
    responses.router,
    completions.router,
    models.router,
    tokenization.router,
    health.router,
)


def build_app(config: GatewayConfig, client_config: ClientConfig | None = None) -> FastAPI:
    """An application that connects to the schedulers of `config` while it runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        checker = GrammarChecker()
        try:
            async with Fleet(config.schedulers, client_config) as fleet:
                app.state.gateway = Gateway(config, fleet, checker)
                yield
        finally:
            await checker.close()

    app = FastAPI(title="splitserve", version=metadata.version("splitserve"), lifespan=lifespan)
    for router in _ROUTERS:
        app.include_router(router)
    app.openapi = openapi_of(app)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(SplitserveError, _on_client_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it"
    return error.response()


async def _on_client_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SplitserveError), "registered for it"
    return api_error(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, "invalid_request_error", message).response()
