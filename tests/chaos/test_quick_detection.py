"""Executors that are killed, and that hang: how the scheduler finds out, with real processes.

Nothing here is timed. With a broken connection or a step the scheduler has an hour's patience, so
that what goes on does so for another reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, SamplingParams
from tests.chaos.test_process_loss import Stream
from tests.support.models.hugging_face import generate_greedily, load_reference
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.processes import Processes, processes

NUM_TOKENS = 400
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=2)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[int]:
    return generate_greedily(load_reference(model), PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Processes]:
    with processes(model) as running:
        running.start_scheduler("--reconnect-timeout-s", "3600", "--step-timeout-s", "3600")
        yield running


async def busy_executor(running: Processes) -> str:
    """The only one that has a request."""
    executors = await running.wait_until(
        lambda all_: sum(e.num_running_requests for e in all_) == 1
    )
    return max(executors, key=lambda executor: executor.num_running_requests).address


async def test_stream_goes_on_elsewhere_when_its_executor_is_killed(
    running: Processes, truth: list[int]
) -> None:
    async with AsyncClient(running.address) as client:
        await running.run_executors(2)
        stream = Stream()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.run(client, PROMPT, GREEDY))
            await stream.started.wait()
            running.kill_executor(await busy_executor(running))
        assert stream.tokens == truth


async def test_executor_serves_again_when_its_requests_moved_while_it_was_paused(
    running: Processes, truth: list[int]
) -> None:
    async with AsyncClient(running.address) as client:
        await running.run_executors(2)
        stream, later = Stream(), Stream()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.run(client, PROMPT, GREEDY))
            await stream.started.wait()
            paused = await busy_executor(running)
            running.pause_executor(paused)
        assert stream.tokens == truth
        await running.wait_until(lambda all_: paused not in {e.address for e in all_})
        [other] = running.executors.keys() - {paused}

        running.resume_executor(paused)
        await running.wait_until(lambda all_: paused in {e.address for e in all_})
        running.kill_executor(other)
        await running.wait_until(lambda all_: {e.address for e in all_} == {paused})
        await later.run(client, PROMPT, GREEDY)
        assert later.tokens == truth
