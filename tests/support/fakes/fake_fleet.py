"""A gateway's fleet in front of fake schedulers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from splitserve_client import (
    ClientConfig,
    SamplingParams,
    SchedulingParams,
    Tokens,
    UnreadBudget,
)
from splitserve_gateway.upstreams.fleet import Fleet
from splitserve_gateway.upstreams.upstream_request import UpstreamRequest
from splitserve_rpc.discovery import StaticDiscovery
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.server import RunningServer
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.processes.gateway import until

PROMPT = [3, 4, 5]
PARAMS = SamplingParams(seed=7, max_tokens=6)
EXPECTED = expected_tokens(PROMPT, 7, 6)


@dataclass(frozen=True, slots=True)
class Schedulers:
    """Schedulers, and a fleet that knows that all of them take requests."""

    fleet: Fleet
    fakes: list[FakeScheduler]
    servers: list[RunningServer]

    @property
    def num_requests(self) -> list[int]:
        """Of each, how many it was sent."""
        return [len(fake.requests) for fake in self.fakes]

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(holds)

    def addresses_taking(self) -> list[str]:
        return [up.address for up in self.fleet._upstreams if up.served and up.takes_requests]

    async def generate(self, params: SamplingParams = PARAMS) -> list[int]:
        upstream, served = self.fleet.choose(None)
        request = UpstreamRequest(upstream, PROMPT, params, SchedulingParams(), served.model.digest)
        return [
            token_id
            async for event in request.events()
            if isinstance(event, Tokens)
            for token_id in event.token_ids
        ]


@asynccontextmanager
async def schedulers(
    count: int, config: ClientConfig | None = None, digests: Sequence[str] = ()
) -> AsyncIterator[Schedulers]:
    async with AsyncExitStack() as stack:
        fakes = [FakeScheduler() for _ in range(count)]
        for fake, digest in zip(fakes, digests, strict=False):
            fake.model_digest = digest
        servers = [await start(fake) for fake in fakes]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        # Of schedulers that are equally busy the first is chosen first.
        fleet = Fleet(StaticDiscovery(addresses), UnreadBudget(), config, draw=lambda: 0.0)
        await stack.enter_async_context(fleet)
        running = Schedulers(fleet, fakes, servers)
        await running.until(lambda: running.addresses_taking() == addresses)
        yield running


def refuse(reason: str) -> Callable[[object], None]:
    def before_request(_: object) -> None:
        raise DomainError(reason, "not here")

    return before_request
