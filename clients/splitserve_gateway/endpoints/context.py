"""Context of endpoints: the gateway's parts and the caller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request

from splitserve_client import Model
from splitserve_gateway.callers import ANYBODY, Caller, caller_of
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation import Serving
from splitserve_gateway.grammars import GrammarChecker
from splitserve_gateway.http import BodyBudget, Exchanges, read_body
from splitserve_gateway.schemas import ApiRequest
from splitserve_gateway.sharing import FairSemaphore
from splitserve_gateway.upstreams import Fleet

Schema = TypeVar("Schema", bound=ApiRequest)

_PROMPT_FIELDS = frozenset({"messages", "prompt", "prompt_token_ids", "input"})


@dataclass(frozen=True, slots=True)
class Gateway:
    """Parts of the gateway (`request.app.state.gateway`), and the caller of a request."""

    config: GatewayConfig
    fleet: Fleet
    exchanges: Exchanges
    checker: GrammarChecker
    bodies: BodyBudget
    tokenizing: FairSemaphore
    caller: Caller = ANYBODY

    @property
    def models(self) -> list[Model]:
        """Models served now that the caller may use."""
        return self.fleet.models(self.caller.upstreams)

    async def choose(self, model: str | None) -> Serving:
        """Chooses a scheduler that serves `model`; None: any model. Raises ApiError."""
        await self.fleet.wait_read(model, self.caller.upstreams)
        upstream, served = self.fleet.choose(model, self.caller.upstreams)
        return Serving(upstream, served, self.config, self.checker, self.caller)

    @asynccontextmanager
    async def reading(self, request: Request, schema: type[Schema]) -> AsyncIterator[Schema]:
        """Reads and validates the body of `request`. Raises ApiError.

        Counts the body's bytes within the `with`; drops its prompt fields at the end.
        """
        with self.bodies.share(self.caller.party) as share:
            body = await read_body(request, schema, self.config.max_body_bytes, share)
            yield body
            body.forget(_PROMPT_FIELDS & schema.model_fields.keys())


def gateway_of(request: Request) -> Gateway:
    """Returns the gateway that serves `request`, with the caller of `request`."""
    gateway: Gateway = request.app.state.gateway
    return replace(gateway, caller=caller_of(request))
