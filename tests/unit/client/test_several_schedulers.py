"""A client with several schedulers moves to another one when its own fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from splitserve_client import (
    AsyncClient,
    ClientConfig,
    RetryPolicy,
    SamplingParams,
    Schedulers,
    ServerUnreachable,
    schedulers,
)
from splitserve_client import connection as connection_module
from splitserve_contract import DomainError
from splitserve_rpc import RunningServer
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import Cut, FakeScheduler, expected_tokens, start

PROMPT = [3, 4, 5]
PARAMS = SamplingParams(seed=7, max_tokens=6)
EXPECTED = expected_tokens(PROMPT, 7, 6)


class Several:
    """Two schedulers, and a client with both addresses."""

    def __init__(self, fakes: list[FakeScheduler], servers: list[RunningServer]) -> None:
        self.fakes = fakes
        self.servers = servers
        self.addresses = [f"127.0.0.1:{server.port}" for server in servers]
        self.stopping: asyncio.Task[None] | None = None
        self.client = AsyncClient(",".join(self.addresses))

    @property
    def num_requests(self) -> list[int]:
        return [len(fake.requests) for fake in self.fakes]

    async def complete(self) -> list[int]:
        return list((await self.client.complete(PROMPT, PARAMS)).token_ids)

    async def begin(self) -> int:
        """Which one the client has, after a request."""
        assert await self.complete() == EXPECTED
        return self.num_requests.index(1)


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    async with AsyncExitStack() as stack:
        fakes = [FakeScheduler(), FakeScheduler()]
        servers = [await start(fake) for fake in fakes]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        running = Several(fakes, servers)
        stack.push_async_callback(running.client.close)
        yield running


async def test_stream_goes_on_at_the_other_when_its_scheduler_dies(several: Several) -> None:
    first = await several.begin()

    def die(number: int) -> None:
        if number == 9:  # of the second request
            several.stopping = asyncio.create_task(several.servers[first].set_serving(("",), False))
            raise Cut

    several.fakes[first].before_token = die
    assert await several.complete() == EXPECTED
    assert several.num_requests[1 - first] == 1
    resumed = several.fakes[1 - first].requests[-1]
    assert 0 < len(resumed.resume_token_ids) < len(EXPECTED)
    assert list(resumed.resume_token_ids) == EXPECTED[: len(resumed.resume_token_ids)]


async def test_session_moves_when_its_scheduler_is_gone(several: Several) -> None:
    first = await several.begin()
    several.fakes[first].hold = asyncio.Event()
    async with several.client.session() as session:
        requests = [session.submit(PROMPT, PARAMS) for _ in range(3)]
        await _until(lambda: several.num_requests[first] == 4)
        await several.servers[first].server.stop(None)
        for request in requests:
            tokens = [token async for event in request for token in getattr(event, "token_ids", ())]
            assert tokens == EXPECTED
    assert several.num_requests[1 - first] == 3


async def test_idle_scheduler_is_used_when_it_is_the_only_one(several: Several) -> None:
    await several.servers[0].server.stop(None)
    await several.servers[1].set_serving(("",), False)
    assert await several.begin() == 1


async def test_request_moves_when_its_scheduler_has_no_executor(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_SILENCE_S", 0.01)
    first = await several.begin()
    several.fakes[first].hold = asyncio.Event()
    completing = asyncio.create_task(several.complete())
    await _until(lambda: several.num_requests[first] == 2)
    await several.servers[first].set_serving(("",), False)
    assert await completing == EXPECTED
    assert several.num_requests[1 - first] == 1


async def test_session_moves_when_refused_without_an_executor(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_SILENCE_S", 0.2)
    # It is never silent for so long.
    config = ClientConfig(retry=RetryPolicy(first_delay_s=0.001, max_delay_s=0.002))

    def refuse(_: object) -> None:
        raise DomainError("DRAINING", "it never had an executor")

    async with AsyncClient(",".join(several.addresses), config) as client:
        assert (await client.complete(PROMPT, PARAMS)).token_ids == tuple(EXPECTED)
        first = several.num_requests.index(1)
        several.fakes[first].before_request = refuse
        async with client.session() as session:
            requests = [session.submit(PROMPT, PARAMS) for _ in range(3)]
            await several.servers[first].set_serving(("",), False)
            for request in requests:
                tokens = [
                    token async for event in request for token in getattr(event, "token_ids", ())
                ]
                assert tokens == EXPECTED
    assert several.num_requests[1 - first] == 3


async def test_token_comes_at_once_when_another_scheduler_is_looked_for(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await several.begin()
    several.fakes[first].hold = hold = asyncio.Event()

    async def look(_: object) -> bool:
        hold.set()
        return await asyncio.Future()

    monkeypatch.setattr(connection_module, "_SILENCE_S", 0.01)
    monkeypatch.setattr(Schedulers, "elsewhere", property(lambda _: look))
    assert await several.complete() == EXPECTED
    assert several.num_requests[1 - first] == 0


async def test_schedulers_come_and_go_when_they_are_in_a_file(
    several: Several, tmp_path: Path
) -> None:
    path = tmp_path / "schedulers"
    path.write_text(several.addresses[0])
    async with AsyncClient(f"file:{path}") as client:
        await client.complete(PROMPT, PARAMS)
        path.write_text(f"{several.addresses[1]}\n")
        await client.complete(PROMPT, PARAMS)
    assert several.num_requests == [1, 1]


@pytest.mark.parametrize("address", ["a:1,b", "a:1,", "dns:a", "file:/nowhere/at/all"])
def test_address_is_refused_when_it_makes_no_sense(address: str) -> None:
    with pytest.raises(ServerUnreachable, match="cannot be used"):
        AsyncClient(address)


async def test_clients_are_spread_when_there_are_many(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers, "_PACE_S", 3600.0)
    random.seed(0)
    for _ in range(10):
        async with AsyncClient(",".join(several.addresses)) as client:
            await client.complete(PROMPT, PARAMS)
    assert sum(several.num_requests) == 10
    assert min(several.num_requests) >= 2


async def _until(holds: Callable[[], bool]) -> None:
    async def look() -> tuple[bool, object]:
        return holds(), None

    await poll(look)
