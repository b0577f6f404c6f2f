"""Two schedulers share a fleet: one is killed in mid-stream, and comes back. Real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from executor_service.service.registration import ranked
from splitserve_client import AsyncClient, BeamSearch, Completion, Executor, SamplingParams
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, light_processes

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

NUM_TOKENS = 200
# So far streams come before anything happens to their scheduler.
HELD_AT = 40
SCHEDULER = ("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER)
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
class Load:
    """Requests that the executors of a scheduler have, and steps that they have done."""

    scheduler: Processes
    num_requests: int
    num_steps: int

    @classmethod
    def of(cls, scheduler: Processes, executors: list[Executor]) -> Load:
        num_requests = sum(e.num_running_requests + e.num_waiting_requests for e in executors)
        return cls(scheduler, num_requests, sum(e.num_steps for e in executors))


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

    async def loads(self) -> list[Load]:
        """Of each scheduler that lives."""
        alive = [each for each in (self.one, self.two) if each.is_scheduler_alive]
        return [Load.of(each, await each.wait_until(lambda _: True)) for each in alive]

    async def wait_settled(self) -> None:
        """Waits until each executor is where it prefers to be."""
        for scheduler in (self.one, self.two):
            await self.wait_at(scheduler, self.executors[scheduler.address])


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    return gate


@pytest.fixture
def peers(tmp_path: Path, gate: Gate) -> Iterator[Peers]:
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
            scheduler.start_scheduler(*SCHEDULER)
        yield Peers(one, two, executors)


async def complete(client: AsyncClient) -> list[tuple[Completion, ...]]:
    """All prompts side by side."""
    generations = await asyncio.gather(
        *(client.complete(prompt, params) for prompt, params in zip(PROMPTS, KINDS, strict=True))
    )
    return [generation.completions for generation in generations]


@asynccontextmanager
async def in_the_middle(
    client: AsyncClient, peers: Peers, gate: Gate
) -> AsyncIterator[tuple[asyncio.Task[list[tuple[Completion, ...]]], Processes]]:
    """`complete`, which has come to its middle and goes on after the context, and who has most."""
    gate.hold(0)
    completing = asyncio.create_task(complete(client))

    async def are_there() -> tuple[bool, list[Load]]:
        loads = await peers.loads()
        return sum(load.num_requests for load in loads) == len(PROMPTS), loads

    num_steps = sum(load.num_steps for load in await poll(are_there)) + HELD_AT // 2
    gate.hold(HELD_AT)

    async def have_begun() -> tuple[bool, list[Load]]:
        loads = await peers.loads()
        return sum(load.num_steps for load in loads) >= num_steps, loads

    yield completing, max(await poll(have_begun), key=lambda load: load.num_requests).scheduler
    assert not completing.done()
    gate.release()


async def test_no_stream_is_lost_or_changed_when_a_scheduler_dies_and_comes_back(
    peers: Peers, gate: Gate
) -> None:
    await peers.wait_settled()
    async with AsyncClient(peers.addresses, PATIENT) as client:
        async with in_the_middle(client, peers, gate) as (completing, busy):
            busy.kill_scheduler()
        assert await completing == EXPECTED
        other = peers.two if busy is peers.one else peers.one
        await peers.wait_at(other, peers.executors[busy.address] | peers.executors[other.address])

        # It comes back while there is work: its executors go back to it, and no stream notices.
        async with in_the_middle(client, peers, gate) as (completing, _):
            busy.start_scheduler(*SCHEDULER)
        await peers.wait_settled()
        assert await completing == EXPECTED
        assert await complete(client) == EXPECTED
