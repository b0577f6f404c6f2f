"""Context of endpoints: the gateway's parts and the caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request

from splitserve_adapters import AdapterInvalid, check_adapter_name
from splitserve_client import Adapter, Model
from splitserve_common import Discovery
from splitserve_gateway.callers import ANYBODY, Caller, caller_of
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation import RequestedAdapter, ResumeHeaders, Serving
from splitserve_gateway.grammars import GrammarChecker
from splitserve_gateway.http import BodyBudget, Exchanges, read_body, too_many_requests
from splitserve_gateway.schemas import IGNORES_UNKNOWN, ApiRequest
from splitserve_gateway.sharing import FairSemaphore, TooManyWait
from splitserve_gateway.upstreams import Fleet, Upstream

Schema = TypeVar("Schema", bound=ApiRequest)

_PROMPT_FIELDS = frozenset(
    {
        "messages", "prompt", "prompt_token_ids", "input",
        "query", "queries", "documents", "text_1", "text_2",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gateway:
    """Parts of the gateway (`request.app.state.gateway`), and the caller of a request.

    `operators`: addresses of schedulers for operators. `resuming`: what the caller says about
    ids of events.
    """

    config: GatewayConfig
    fleet: Fleet
    exchanges: Exchanges
    checker: GrammarChecker
    bodies: BodyBudget
    tokenizing: FairSemaphore
    decoding: FairSemaphore
    operators: Discovery
    caller: Caller = ANYBODY
    resuming: ResumeHeaders = field(default_factory=ResumeHeaders)

    @property
    def models(self) -> list[Model]:
        """Models served now that the caller may use."""
        return self.fleet.models(self.caller.upstreams)

    @property
    def validation_context(self) -> dict[str, object] | None:
        """Context in which bodies are validated."""
        return IGNORES_UNKNOWN if self.config.unknown_fields == "ignore" else None

    async def adapters(self) -> list[tuple[Adapter, Model]]:
        """Returns the registered adapters that the caller may use, each with its model."""
        lists = await self.fleet.adapters(self.caller.upstreams, self.caller.credential)
        taken = {model.name for model in self.models}
        found = {
            adapter.name: (adapter, upstream.served.model)
            for upstream, listed in lists.items()
            if upstream.served is not None
            for adapter in listed.values()
            if adapter.name not in taken
        }
        return list(found.values())

    async def choose(
        self, model: str | None, prefers: Callable[[Model], bool] | None = None
    ) -> Serving:
        """Chooses a scheduler that serves `model`; None: any model. Raises ApiError.

        `prefers`: whether a model suits the request, if it names none; None if each does.

        `model`: name of a model or of an adapter. A name that no scheduler lists is taken for an
        adapter of the first model, whose scheduler decides.
        """
        allowed, adapter = self.caller.upstreams, None
        await self.fleet.wait_read(model, allowed)
        models = [each.name for each in self.models]
        if model is not None and models and model not in models:
            adapter, allowed = await self._find_adapter(model, models)
            model = None
        upstream, served = self.fleet.choose(model, allowed, prefers=prefers)
        return Serving(
            upstream,
            served,
            self.config,
            self.checker,
            self.caller,
            adapter,
            self.resuming,
        )

    async def listed(
        self, model: str | None, prefers: Callable[[Model], bool] | None = None
    ) -> Serving:
        """Chooses like `choose`, but only models and adapters that are listed. Raises ApiError."""
        serving = await self.choose(model, prefers)
        if serving.adapter is not None and not serving.adapter.is_listed:
            raise serving.adapter.unknown()
        return serving

    @asynccontextmanager
    async def tokenizer_turn(self, *, is_small: bool) -> AsyncIterator[None]:
        """Holds a place in the tokenizer's threads, in turns of tenants; small texts need no place.

        A holder never waits for schedulers. Raises ApiError if too many texts wait.
        """
        if is_small:
            yield
            return
        try:
            async with self.tokenizing.place(self.caller.party):
                yield
        except TooManyWait as error:
            raise too_many_requests("too many texts wait for the tokenizer") from error

    async def _find_adapter(
        self, name: str, models: Sequence[str]
    ) -> tuple[RequestedAdapter, frozenset[Upstream]]:
        """Returns the adapter `name`, and the schedulers that may serve it. Raises ApiError."""
        caller = self.caller
        lists = await self.fleet.adapters(caller.upstreams, caller.credential, name)
        able = frozenset(upstream for upstream, listed in lists.items() if name in listed)
        adapter = RequestedAdapter(name, bool(able), models, tuple(lists.values()))
        try:
            check_adapter_name(name)
        except AdapterInvalid as error:
            raise adapter.unknown() from error
        if not able:
            served = ((upstream, upstream.served) for upstream in lists)
            able = frozenset(u for u, s in served if s is not None and s.model.name == models[0])
        return adapter, able

    @asynccontextmanager
    async def reading(self, request: Request, schema: type[Schema]) -> AsyncIterator[Schema]:
        """Reads and validates the body of `request`. Raises ApiError.

        Counts the body's bytes within the `with`; drops its prompt fields at the end.
        """
        with self.bodies.share(self.caller.party) as share:
            body = await read_body(
                request, schema, self.config.max_body_bytes, share, self.validation_context
            )
            yield body
            body.forget(_PROMPT_FIELDS & schema.model_fields.keys())


def gateway_of(request: Request) -> Gateway:
    """Returns the gateway that serves `request`, with what it knows from the request's headers."""
    gateway: Gateway = request.app.state.gateway
    return replace(gateway, caller=caller_of(request), resuming=ResumeHeaders.of(request.headers))
