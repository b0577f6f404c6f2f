"""Two schedulers share a fleet: one is killed in mid-stream, and comes back. Real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from executor_service.service.scheduler_choice import ranked
from splitserve_client import AsyncClient, BeamSearch, Generation, SamplingParams
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.addresses import reserve_address
from tests.support.processes.processes import Processes, processes

NUM_TOKENS = 150
KILL_AFTER = 15
PROMPTS = ([5, 6, 7], [9] * 20, [11, 12], [21, 22, 23, 24, 25])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.95, seed=17, max_tokens=NUM_TOKENS, ignore_eos=True
)
PARAMS = (
    GREEDY,
    SAMPLED,
    SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(
        temperature=0.0,
        n=2,
        beam_search=BeamSearch(3),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Peers:
    """Schedulers `one` and `two`; of the executors two prefer the first, one the second."""

    one: Processes
    two: Processes
    executors: dict[str, set[str]]

    @property
    def addresses(self) -> str:
        return f"{self.one.address},{self.two.address}"

    async def wait_at(self, scheduler: Processes, executors: set[str]) -> None:
        """Waits until just these are connected to `scheduler`."""
        await scheduler.wait_until(lambda known: {e.address for e in known} == executors)

    async def wait_settled(self) -> None:
        """Waits until each executor is where it prefers to be."""
        for scheduler in (self.one, self.two):
            await self.wait_at(scheduler, self.executors[scheduler.address])


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=2)
    with processes(model) as one, processes(model) as two:
        schedulers = (one.address, two.address)
        executors: dict[str, set[str]] = {one.address: set(), two.address: set()}
        for preferred in (one.address, one.address, two.address):
            address = reserve_address()
            while ranked(schedulers, address)[0] != preferred:
                address = reserve_address()
            one.start_executor(
                f"--scheduler={','.join(schedulers)}",
                f"--advertise-address={address}",
                "--move-after-s=0.1",
                address=address,
            )
            executors[preferred].add(address)
        for scheduler in (one, two):
            scheduler.start_scheduler("--reconnect-timeout-s", "0.2")
        yield Peers(one, two, executors)


async def complete(client: AsyncClient, started: asyncio.Event | None = None) -> list[Generation]:
    """All prompts side by side; `started` is set when all that are streamed are in full swing."""

    async def one(index: int, prompt: list[int]) -> Generation:
        return await client.complete(prompt, PARAMS[index])

    async def watch() -> None:
        num_tokens = 0
        params = SamplingParams(temperature=0.0, max_tokens=10 * NUM_TOKENS, ignore_eos=True)
        async for _ in client.generate([1, 2], params):
            num_tokens += 1
            if num_tokens >= KILL_AFTER and started is not None:
                started.set()
                return

    async with asyncio.TaskGroup() as tasks:
        generating = [
            tasks.create_task(one(index, list(prompt))) for index, prompt in enumerate(PROMPTS)
        ]
        if started is not None:
            tasks.create_task(watch())
    return [task.result() for task in generating]


def tokens(generations: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(completion.token_ids) for completion in generation.completions]
        for generation in generations
    ]


async def test_no_stream_is_lost_or_changed_when_a_scheduler_dies_and_comes_back(
    peers: Peers,
) -> None:
    await peers.wait_settled()
    async with AsyncClient(peers.addresses) as client:
        undisturbed = tokens(await complete(client))
        busy, other = await busy_first(peers, client)

        started = asyncio.Event()
        completing = asyncio.create_task(complete(client, started))
        await started.wait()
        assert not completing.done()
        busy.kill_scheduler()
        assert tokens(await completing) == undisturbed
        await peers.wait_at(other, peers.executors[busy.address] | peers.executors[other.address])

        # It comes back while there is work: its executors go back to it, and no stream notices.
        started = asyncio.Event()
        completing = asyncio.create_task(complete(client, started))
        await started.wait()
        busy.start_scheduler("--reconnect-timeout-s", "0.2")
        await peers.wait_settled()
        assert tokens(await completing) == undisturbed
        assert tokens(await complete(client)) == undisturbed


async def busy_first(peers: Peers, client: AsyncClient) -> tuple[Processes, Processes]:
    """Which scheduler `client` has, and the other."""
    before = {scheduler.address: await num_steps(scheduler) for scheduler in (peers.one, peers.two)}
    await client.complete([3], SamplingParams(max_tokens=3))
    if await num_steps(peers.one) > before[peers.one.address]:
        return peers.one, peers.two
    return peers.two, peers.one


async def num_steps(scheduler: Processes) -> int:
    async with AsyncClient(scheduler.address) as operator:
        return sum(e.num_steps for e in (await operator.list_executors()).executors)
