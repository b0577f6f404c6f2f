"""What endpoints are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation.serving import Serving
from splitserve_gateway.grammars.checker import GrammarChecker
from splitserve_gateway.http.bodies import read_body
from splitserve_gateway.http.guard import Exchanges
from splitserve_gateway.upstreams.fleet import Fleet

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as every endpoint finds them in `request.app.state.gateway`."""

    config: GatewayConfig
    fleet: Fleet
    exchanges: Exchanges
    checker: GrammarChecker

    def choose(self, model: str | None) -> Serving:
        """Who serves `model`; None: any. Raises ApiError."""
        upstream, served = self.fleet.choose(model)
        return Serving(upstream, served, self.config, self.checker)

    async def read(self, request: Request, schema: type[Schema]) -> Schema:
        """The body of `request`. Raises ApiError."""
        return await read_body(request, schema, self.config.max_body_bytes)


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves `request`."""
    gateway: Gateway = request.app.state.gateway
    return gateway
