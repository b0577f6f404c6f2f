"""Requests go where their prefix is, through a real scheduler."""

from __future__ import annotations

import asyncio

from splitserve_client import AsyncClient, SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.fake_service import StepWatch, fake_service

PARAMS = SamplingParams(seed=4, max_tokens=5)


def prompt_of(number: int) -> list[int]:
    """Prompts of different numbers begin differently."""
    return [number, *((7 * number + 3 * i) % 128 for i in range(1, 30))]


async def num_cached(client: AsyncClient, prompt: list[int]) -> int:
    """Completes `prompt` as it must be; returns how many of its tokens were cached."""
    generation = await client.complete(prompt, PARAMS)
    assert generation.completions == expected_completions(prompt, PARAMS)
    return generation.usage.num_cached_tokens


async def test_conversations_come_back_to_the_executors_that_had_them() -> None:
    watches = [StepWatch(), StepWatch()]
    executors = [FakeExecutor(num_device_blocks=256, fault=watch) for watch in watches]
    async with fake_service(*executors) as service:
        for watch in watches:
            watch.hold()
        # Whoever comes when one executor has work goes to the other.
        first = asyncio.create_task(num_cached(service.client, prompt_of(1)))
        second = asyncio.create_task(num_cached(service.client, prompt_of(2)))
        for watch in watches:
            await watch.wait_held()
        for watch in watches:
            watch.release()
        assert (await first, await second) == (0, 0)

        for _ in range(2):
            for number in (1, 2):
                assert await num_cached(service.client, prompt_of(number)) == 28
        # An executor that is lost takes what it had along, and nobody looks for it there.
        await service.kill(executors[0], watches[0])
        cached = [await num_cached(service.client, prompt_of(number)) for number in (1, 2)]
        assert sorted(cached) == [0, 28]
