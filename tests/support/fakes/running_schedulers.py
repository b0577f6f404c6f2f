"""Fake schedulers that serve: in a thread, behind a gateway's fleet, or for executors alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_client import (
    ClientConfig,
    SamplingParams,
    SchedulingParams,
    Tokens,
    UnreadBudget,
)
from splitserve_common import StaticDiscovery
from splitserve_contract import DomainError
from splitserve_gateway.upstreams import Fleet, UpstreamRequest
from splitserve_rpc import OPEN, RunningServer, ServerSecurity, bind_server
from tests.support.fakes.fake_scheduler import VOCAB_SIZE, FakeScheduler, expected_tokens, start
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import until
from tests.support.processes.patience import PATIENCE_S

T = TypeVar("T")
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}t9"


class FakeServer:
    """A fake scheduler with an event loop in a thread: commands run loops of their own."""

    def __init__(self, security: ServerSecurity = OPEN) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        files = {
            "tokenizer.json": tiny_tokenizers.words(VOCAB_SIZE).to_str().encode(),
            "chat_template.jinja": TEMPLATE.encode(),
        }
        self.fake = self.run(self._make(files))
        self.running = self.run(start(self.fake, security=security))
        self.address = f"127.0.0.1:{self.running.port}"

    async def _make(self, files: dict[str, bytes]) -> FakeScheduler:
        return FakeScheduler(tokenizer_files=files)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.run(self.running.server.stop(None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def words_of(token_ids: list[int]) -> str:
    return " ".join(f"t{token_id}" for token_id in token_ids)


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
        """Number of requests sent to each scheduler."""
        return [len(fake.requests) for fake in self.fakes]

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(holds)

    def addresses_taking(self) -> list[str]:
        return [up.address for up in self.fleet._upstreams if up.served and up.takes_requests]

    async def generate(
        self, params: SamplingParams = PARAMS, came: list[int] | None = None
    ) -> list[int]:
        """Returns the tokens of a request; `came` gets them as they arrive."""
        tokens = [] if came is None else came
        upstream, served = self.fleet.choose(None)
        request = UpstreamRequest(upstream, PROMPT, params, SchedulingParams(), served.model.digest)
        async for event in request.events():
            if isinstance(event, Tokens):
                tokens += event.token_ids
        return tokens


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


class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """`registered`: who did, each time."""

    def __init__(self) -> None:
        self.registered: asyncio.Queue[pb.ExecutorInfo] = asyncio.Queue()

    async def Register(  # noqa: N802
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterResponse:
        self.registered.put_nowait(request.executor)
        version = pb.ContractVersion(major=1)
        return registry_pb2.RegisterResponse(scheduler_epoch=1, contract_version=version)


@asynccontextmanager
async def fake_registry() -> AsyncIterator[tuple[FakeRegistry, str]]:
    """Runs a registry; yields it and its address."""
    running = bind_server("127.0.0.1:0", ())
    servicer = FakeRegistry()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    yield servicer, f"127.0.0.1:{running.port}"
    await running.server.stop(None)
