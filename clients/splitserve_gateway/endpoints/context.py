"""What endpoints are given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation.serving import Serving
from splitserve_gateway.grammars.checker import GrammarChecker
from splitserve_gateway.http.bodies import read_body
from splitserve_gateway.http.body_budget import BodyBudget
from splitserve_gateway.http.guard import Exchanges
from splitserve_gateway.schemas.base import ApiRequest
from splitserve_gateway.upstreams.fleet import Fleet

Schema = TypeVar("Schema", bound=ApiRequest)

_PROMPT_FIELDS = frozenset({"messages", "prompt", "prompt_token_ids", "input"})


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as every endpoint finds them in `request.app.state.gateway`."""

    config: GatewayConfig
    fleet: Fleet
    exchanges: Exchanges
    checker: GrammarChecker
    bodies: BodyBudget

    def choose(self, model: str | None) -> Serving:
        """Who serves `model`; None: any. Raises ApiError."""
        upstream, served = self.fleet.choose(model)
        return Serving(upstream, served, self.config, self.checker)

    @asynccontextmanager
    async def reading(self, request: Request, schema: type[Schema]) -> AsyncIterator[Schema]:
        """The body of `request`. Raises ApiError.

        Within the `with` its bytes are counted; after it, what a prompt is made from is gone.
        """
        with self.bodies.share() as share:
            body = await read_body(request, schema, self.config.max_body_bytes, share)
            yield body
            body.forget(_PROMPT_FIELDS & schema.model_fields.keys())


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves `request`."""
    gateway: Gateway = request.app.state.gateway
    return gateway
