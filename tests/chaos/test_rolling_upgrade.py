"""All executors are replaced, one after another, under load: no stream notices."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, BeamSearch, RetryPolicy, SamplingParams
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import light_processes

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

NUM_EXECUTORS = 3
SAMPLED = SamplingParams(seed=17, max_tokens=80)
KINDS = (
    replace(SAMPLED, temperature=0.0),
    SAMPLED,
    replace(SAMPLED, n=3),
    replace(SAMPLED, n=2, beam_search=BeamSearch(3)),
    replace(SAMPLED, n=2, best_of=3, max_tokens=60),
)
REQUESTS = [
    ([number, 7, *range(3, 3 + number)], KINDS[number % len(KINDS)]) for number in range(12)
]
EXPECTED = [expected_completions(prompt, params) for prompt, params in REQUESTS]
# A stream that breaks is an error: whatever the client could mend is not to happen.
PATIENCE_OF_NONE = replace(PATIENT, retry=RetryPolicy(give_up_after_s=-1.0))


@dataclass(slots=True)
class Load:
    """As many streams at a time as there are REQUESTS, each followed by another, until `stop`."""

    client: AsyncClient
    num_done: int = 0
    is_over: bool = False

    async def run(self, number: int) -> None:
        prompt, params = REQUESTS[number]
        while not self.is_over:
            generation = await self.client.complete(prompt, params)
            assert generation.completions == EXPECTED[number]
            self.num_done += 1


async def test_no_stream_notices_when_all_executors_are_replaced_one_by_one(tmp_path: Path) -> None:
    with light_processes(tmp_path / "log") as running:
        running.start_scheduler()
        old = [executor.address for executor in await running.run_executors(NUM_EXECUTORS)]
        async with AsyncClient(running.address, PATIENCE_OF_NONE) as client:
            load = Load(client)
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(REQUESTS)):
                    tasks.create_task(load.run(number))
                for _ in old:
                    running.start_executor("--drain-timeout-s", "600")
                for address in old:
                    await running.wait_until(lambda executors: len(executors) > NUM_EXECUTORS)
                    # Nothing is left to wait for once its own streams are over.
                    assert await running.stop_executor(address) == 0
                load.is_over = True
        now = await running.wait_until(lambda executors: len(executors) == NUM_EXECUTORS)
        assert {executor.address for executor in now}.isdisjoint(old)
        assert load.num_done >= len(REQUESTS)
