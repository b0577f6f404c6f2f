"""All executors are replaced, one after another, under load: no stream notices."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    ClientConfig,
    Generation,
    RetryPolicy,
    SamplingParams,
)
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.processes import processes

NUM_EXECUTORS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.95, seed=17)
KINDS = (
    GREEDY,
    SAMPLED,
    replace(SAMPLED, n=3),
    replace(GREEDY, n=2, beam_search=BeamSearch(3)),
    replace(SAMPLED, n=2, best_of=3, max_tokens=60),
    replace(GREEDY, num_logprobs=1, repetition_penalty=1.2),
)
REQUESTS = [
    ([number, 7, *range(3, 3 + number)], KINDS[number % len(KINDS)]) for number in range(12)
]
# A stream that breaks is an error: whatever the client could mend is not to happen.
PATIENCE_OF_NONE = ClientConfig(retry=RetryPolicy(give_up_after_s=-1.0))


@dataclass(slots=True)
class Load:
    """As many streams at a time as there are REQUESTS, each followed by another, until `stop`."""

    client: AsyncClient
    expected: list[list[tuple[int, ...]]]
    num_done: int = 0
    is_over: bool = False

    async def run(self, number: int) -> None:
        while not self.is_over:
            assert tokens_of(await ask(self.client, number)) == self.expected[number]
            self.num_done += 1


async def ask(client: AsyncClient, number: int) -> Generation:
    prompt, params = REQUESTS[number]
    return await client.complete(prompt, params)


def tokens_of(generation: Generation) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in generation.completions]


@pytest.mark.timeout(1200)
async def test_no_stream_notices_when_all_executors_are_replaced_one_by_one(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "llama", seed=2)
    log = tmp_path / "log"
    with processes(model, log) as running:
        running.start_scheduler()
        old = [executor.address for executor in await running.run_executors(NUM_EXECUTORS)]
        async with AsyncClient(running.address, PATIENCE_OF_NONE) as client:
            numbers = range(len(REQUESTS))
            undisturbed = [tokens_of(await ask(client, number)) for number in numbers]
            load = Load(client, undisturbed)
            async with asyncio.TaskGroup() as tasks:
                for number in numbers:
                    tasks.create_task(load.run(number))
                for _ in old:
                    running.start_executor("--drain-timeout-s", "30")
                for address in old:
                    await running.wait_until(lambda executors: len(executors) > NUM_EXECUTORS)
                    # Nothing is left to wait for once its own streams are over.
                    assert await running.stop_executor(address) == 0
                load.is_over = True
        now = await running.wait_until(lambda executors: len(executors) == NUM_EXECUTORS)
        assert {executor.address for executor in now}.isdisjoint(old)
        assert load.num_done >= len(REQUESTS)
    # Warnings are not logged by these processes, errors are.
    assert log.read_text() == ""
