"""A request that executors die of is found and failed by name; what others get is what they would.

Executors that died are started again, at other addresses, as an orchestrator does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, BeamSearch, Generation, RequestFailed, SamplingParams
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.mortal_executor import MODULE, VARIABLE
from tests.support.processes.processes import Processes

NUM_EXECUTORS = 3
POISON_SEED = 666
PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.95)
INNOCENTS = [
    *[replace(SAMPLED, seed=seed) for seed in range(8)],
    *[replace(SAMPLED, seed=seed, n=2) for seed in range(8, 10)],
    replace(SAMPLED, seed=10, num_logprobs=1),
    replace(GREEDY, n=2, beam_search=BeamSearch(3)),
]
POISON = replace(SAMPLED, seed=POISON_SEED)
# Its prompt and so many tokens more are computed without harm.
LENGTH = len(PROMPT) + 9


class Mortal(Processes):
    """Processes with executors that die, of which there are always as many as can be had."""

    executor_module = MODULE
    num_deaths = 0

    async def keep_up(self) -> None:
        """Starts another executor for each that died."""
        while True:
            for address, process in list(self.executors.items()):
                if process.poll() is not None:
                    self.num_deaths += 1
                    self.kill_executor(address)
                    self.start_executor()
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self.keep_up())
        try:
            yield
        finally:
            keeping.cancel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=2)


@pytest.fixture
def running(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mortal]:
    monkeypatch.setenv(VARIABLE, f"die:{POISON_SEED}:{LENGTH}")
    running = Mortal(model)
    try:
        running.start_scheduler()
        yield running
    finally:
        running.kill_all()


async def complete_all(client: AsyncClient) -> list[Generation]:
    return await asyncio.gather(
        *(client.complete([9, 10, number], params) for number, params in enumerate(INNOCENTS))
    )


async def test_poison_is_failed_and_innocents_get_their_tokens_when_executors_die_of_it(
    running: Mortal,
) -> None:
    await running.run_executors(NUM_EXECUTORS)
    async with AsyncClient(running.address) as client, running.kept_up():
        undisturbed = await complete_all(client)

        poisoned = asyncio.create_task(client.complete(PROMPT, POISON))
        found = await complete_all(client)
        with pytest.raises(RequestFailed) as caught:
            await poisoned

        assert caught.value.reason == "EXECUTOR_LOST_REPEATEDLY"
        assert [each.completions for each in found] == [each.completions for each in undisturbed]
        assert running.num_deaths <= 3
        # The fleet goes on.
        again = await complete_all(client)
        assert [each.completions for each in again] == [each.completions for each in undisturbed]
