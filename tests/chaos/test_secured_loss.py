"""Executors die by SIGKILL where everybody proves who they are: streams go on, over TLS as ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, BeamSearch, ClientConfig, Executor, SamplingParams
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, light_processes
from tests.support.security.cluster import Certificates

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

HELD_AT = 20
SAMPLED = SamplingParams(seed=3, max_tokens=60)
REQUESTS = [
    ([5, 6, 7], SAMPLED),
    ([9] * 20, replace(SAMPLED, temperature=0.0)),
    ([11, 12], replace(SAMPLED, n=3)),
    ([21, 22], replace(SAMPLED, n=2, beam_search=BeamSearch(3))),
]
EXPECTED = [expected_completions(prompt, params) for prompt, params in REQUESTS]


@dataclass(frozen=True, slots=True)
class Secured:
    """`cluster`: where executors register and operators ask, with certificates."""

    running: Processes
    certificates: Certificates
    cluster: str
    client: ClientConfig

    def start_executor(self) -> None:
        self.running.start_executor(
            f"--scheduler={self.cluster}", *self.certificates.flags("executor")
        )

    async def wait_executors(
        self, count: int, *, num_requests: int = 0, num_steps: int = 0
    ) -> list[str]:
        """Waits until `count` are there and have so many requests, whose steps are so many.

        Who has most is the last.
        """

        def are_there(executors: list[Executor]) -> bool:
            busy = [e for e in executors if num_of(e)]
            return (
                len(executors) == count
                and sum(num_of(e) for e in busy) == num_requests
                and all(e.num_steps >= num_steps for e in busy)
            )

        operator = replace(PATIENT, credentials=self.certificates.client("operator"))
        executors = await self.running.wait_until(are_there, self.cluster, operator)
        return [executor.address for executor in sorted(executors, key=num_of)]


def num_of(executor: Executor) -> int:
    return executor.num_running_requests + executor.num_waiting_requests


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    return gate


@pytest.fixture
def secured(tmp_path: Path, gate: Gate) -> Iterator[Secured]:
    certificates = Certificates.make(tmp_path / "certificates", "--client", "alice")
    client = replace(PATIENT, credentials=certificates.client("alice"))
    cluster = reserve_address()
    with light_processes(tmp_path / "log") as running:
        running.start_scheduler(
            *(f"--cluster-listen={cluster}", *certificates.flags("scheduler")),
            f"--tls-client-ca={certificates.directory / 'ca.crt'}",
            *("--reconnect-timeout-s=0.2", *GATED_SCHEDULER),
        )
        yield Secured(running, certificates, cluster, client)


async def test_streams_go_on_when_executors_are_killed_and_everything_is_encrypted(
    secured: Secured, gate: Gate
) -> None:
    for _ in range(2):
        secured.start_executor()
    await secured.wait_executors(2)
    gate.hold(HELD_AT)
    async with AsyncClient(secured.running.address, secured.client) as client:
        completing = [
            asyncio.create_task(client.complete(prompt, params)) for prompt, params in REQUESTS
        ]
        # One after the other, each in the middle of its streams, until nobody is left.
        in_the_middle = {"num_requests": len(REQUESTS), "num_steps": HELD_AT // 2}
        *_, busiest = await secured.wait_executors(2, **in_the_middle)
        secured.running.kill_executor(busiest)
        (other,) = await secured.wait_executors(1, **in_the_middle)
        secured.running.kill_executor(other)
        assert not any(task.done() for task in completing)
        await secured.wait_executors(0)
        gate.release()
        secured.start_executor()
        generations = await asyncio.gather(*completing)
    assert [generation.completions for generation in generations] == EXPECTED
