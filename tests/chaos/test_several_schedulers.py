"""Two schedulers share a fleet: one is killed in mid-stream, and comes back. Real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from executor_service.service.scheduler_choice import ranked
from splitserve_client import AsyncClient, BeamSearch, Completion, SamplingParams
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, light_processes

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

NUM_TOKENS = 200
KILL_AFTER = 15
SAMPLED = SamplingParams(seed=17, max_tokens=NUM_TOKENS)
KINDS = (
    replace(SAMPLED, temperature=0.0),
    SAMPLED,
    replace(SAMPLED, n=3),
    replace(SAMPLED, n=2, beam_search=BeamSearch(3)),
)
PROMPTS = ([5, 6, 7], [9] * 20, [11, 12], [21, 22, 23, 24, 25])
EXPECTED = [
    expected_completions(prompt, params) for prompt, params in zip(PROMPTS, KINDS, strict=True)
]


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


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with light_processes(tmp_path / "one") as one, light_processes(tmp_path / "two") as two:
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


async def complete(
    client: AsyncClient, started: asyncio.Event | None = None
) -> list[tuple[Completion, ...]]:
    """All prompts side by side; `started` is set when all that are streamed are in full swing."""

    async def watch() -> None:
        num_tokens = 0
        async for _ in client.generate([1, 2], replace(SAMPLED, max_tokens=4 * NUM_TOKENS)):
            num_tokens += 1
            if num_tokens >= KILL_AFTER and started is not None:
                started.set()
                return

    async with asyncio.TaskGroup() as tasks:
        generating = [
            tasks.create_task(client.complete(prompt, params))
            for prompt, params in zip(PROMPTS, KINDS, strict=True)
        ]
        if started is not None:
            tasks.create_task(watch())
    return [task.result().completions for task in generating]


async def test_no_stream_is_lost_or_changed_when_a_scheduler_dies_and_comes_back(
    peers: Peers,
) -> None:
    await peers.wait_settled()
    async with AsyncClient(peers.addresses, PATIENT) as client:
        busy, other = await busy_first(peers, client)

        started = asyncio.Event()
        completing = asyncio.create_task(complete(client, started))
        await started.wait()
        assert not completing.done()
        busy.kill_scheduler()
        assert await completing == EXPECTED
        await peers.wait_at(other, peers.executors[busy.address] | peers.executors[other.address])

        # It comes back while there is work: its executors go back to it, and no stream notices.
        started = asyncio.Event()
        completing = asyncio.create_task(complete(client, started))
        await started.wait()
        busy.start_scheduler("--reconnect-timeout-s", "0.2")
        await peers.wait_settled()
        assert await completing == EXPECTED
        assert await complete(client) == EXPECTED


async def busy_first(peers: Peers, client: AsyncClient) -> tuple[Processes, Processes]:
    """Which scheduler `client` has, and the other."""
    before = {scheduler.address: await num_steps(scheduler) for scheduler in (peers.one, peers.two)}
    await client.complete([3], SamplingParams(max_tokens=3))
    if await num_steps(peers.one) > before[peers.one.address]:
        return peers.one, peers.two
    return peers.two, peers.one


async def num_steps(scheduler: Processes) -> int:
    async with AsyncClient(scheduler.address, PATIENT) as operator:
        return sum(e.num_steps for e in (await operator.list_executors()).executors)
