"""A request that executors die of, or hang in, is found and failed by name; others get theirs.

Executors that died are started again, at other addresses, as an orchestrator does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, BeamSearch, Completion, RequestFailed, SamplingParams
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.light_executor import DEADLY_REQUEST
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import LightProcesses

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

NUM_EXECUTORS = 3
# One that is silent may be slow, or out of reach: a request is not blamed before it was alone three
# times, and isolated after two. Two executors are left.
NUM_THAT_MAY_HANG = 7
# Two among others and one alone.
MOST_DEATHS = 3
NUM_POISONS = 5
POISON_SEED = 666
PROMPT = [5, 6, 7, 8]
SAMPLED = SamplingParams(max_tokens=60)
INNOCENTS = [
    *[replace(SAMPLED, seed=seed) for seed in range(8)],
    *[replace(SAMPLED, seed=seed, n=2) for seed in range(8, 10)],
    replace(SAMPLED, seed=10, n=2, best_of=3),
    replace(SAMPLED, seed=11, n=2, beam_search=BeamSearch(3)),
]
REQUESTS = [([9, 10, number], params) for number, params in enumerate(INNOCENTS)]
POISON = replace(SAMPLED, seed=POISON_SEED)
# Its prompt and so many tokens more are computed without harm.
LENGTH = len(PROMPT) + 9


class Mortal(LightProcesses):
    """Processes with executors that die, of which there are always as many as can be had."""

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


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Mortal]:
    running = Mortal(tmp_path / "log")
    try:
        # Of an executor that never made a step nobody knows how long one may take.
        running.start_scheduler("--step-timeout-s", "30")
        yield running
    finally:
        running.kill_all()


async def complete_all(client: AsyncClient) -> list[tuple[Completion, ...]]:
    generations = await asyncio.gather(
        *(client.complete(prompt, params) for prompt, params in REQUESTS)
    )
    return [generation.completions for generation in generations]


async def test_poison_is_failed_and_innocents_get_their_tokens_when_executors_die_of_it(
    running: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLY_REQUEST, f"die:{POISON_SEED}:{LENGTH}")
    expected = [expected_completions(prompt, params) for prompt, params in REQUESTS]
    await running.run_executors(NUM_EXECUTORS)
    async with AsyncClient(running.address, PATIENT) as client, running.kept_up():
        poisoned = asyncio.create_task(client.complete(PROMPT, POISON))
        assert await complete_all(client) == expected
        with pytest.raises(RequestFailed) as caught:
            await poisoned

        assert caught.value.reason == "EXECUTOR_LOST_REPEATEDLY"
        assert running.num_deaths <= MOST_DEATHS
        # The fleet goes on.
        assert await complete_all(client) == expected
    assert "violation" not in running.log_text()


async def test_last_executor_serves_all_others_when_two_of_three_died_of_a_request(
    running: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLY_REQUEST, f"die:{POISON_SEED}:{LENGTH}")
    expected = [expected_completions(prompt, params) for prompt, params in REQUESTS]
    await running.run_executors(NUM_EXECUTORS)
    async with AsyncClient(running.address, PATIENT) as client:
        poisoned = asyncio.create_task(client.complete(PROMPT, POISON))
        first = asyncio.create_task(complete_all(client))
        await running.wait_until(lambda executors: len(executors) == 1)
        # Nobody started others yet: no suspect is tried on the last one, and it serves all others.
        assert await complete_all(client) == expected
        assert not poisoned.done()

        async with running.kept_up():
            with pytest.raises(RequestFailed) as caught:
                await poisoned
            assert caught.value.reason == "EXECUTOR_LOST_REPEATEDLY"
            assert await first == expected
    assert "violation" not in running.log_text()


async def test_several_poisons_are_failed_after_a_bounded_number_of_deaths_when_they_come_at_once(
    running: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All with that seed are, whatever their prompts.
    monkeypatch.setenv(DEADLY_REQUEST, f"die:{POISON_SEED}:{LENGTH}")
    expected = [expected_completions(prompt, params) for prompt, params in REQUESTS]
    await running.run_executors(NUM_EXECUTORS)
    async with AsyncClient(running.address, PATIENT) as client, running.kept_up():
        poisoned = [
            asyncio.create_task(client.complete([*PROMPT[:-1], number], POISON))
            for number in range(NUM_POISONS)
        ]
        assert await complete_all(client) == expected
        outcomes = await asyncio.gather(*poisoned, return_exceptions=True)
        reasons = [each.reason for each in outcomes if isinstance(each, RequestFailed)]
        assert reasons == ["EXECUTOR_LOST_REPEATEDLY"] * NUM_POISONS
        # One each, two of each executor before, and one more after the first of them is failed.
        assert running.num_deaths <= NUM_POISONS + 2 * NUM_EXECUTORS + 1
        assert await complete_all(client) == expected
    assert "violation" not in running.log_text()


async def test_poison_is_failed_and_innocents_get_their_tokens_when_executors_hang_in_it(
    running: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLY_REQUEST, f"hang:{POISON_SEED}:{LENGTH}")
    expected = [expected_completions(prompt, params) for prompt, params in REQUESTS]
    await running.run_executors(NUM_THAT_MAY_HANG)
    async with AsyncClient(running.address, PATIENT) as client:
        # So that it is known how long their steps take.
        assert await complete_all(client) == expected
        poisoned = asyncio.create_task(client.complete(PROMPT, POISON))
        assert await complete_all(client) == expected
        with pytest.raises(RequestFailed) as caught:
            await poisoned

        assert caught.value.reason == "EXECUTOR_LOST_REPEATEDLY"
        assert running.are_alive()  # though they hang
        assert await complete_all(client) == expected
    assert "violation" not in running.log_text()
