"""Executors that are killed, and that hang: how the scheduler finds out, with real processes.

Nothing here is timed. With a broken connection or a step the scheduler has an hour's patience, so
that what goes on does so for another reason. Until that has happened executors go so slowly that no
stream comes to its end, and are never as late as one that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from splitserve_client import AsyncClient, SamplingParams
from tests.chaos.test_process_loss import Stream
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.gate import GATE, Gate
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, light_processes

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

PARAMS = SamplingParams(seed=5, max_tokens=400)
# A stream would take more than a minute.
SLOW_S = 0.2
PROMPT = [5, 6, 7]
TRUTH = list(expected_completions(PROMPT, PARAMS)[0].token_ids)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    gate = Gate(tmp_path_factory.mktemp("gate") / "gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GATE, str(gate.path))
        yield gate


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, gate: Gate) -> Iterator[Processes]:
    with light_processes(tmp_path_factory.mktemp("light") / "log") as running:
        running.start_scheduler("--reconnect-timeout-s", "3600", "--step-timeout-s", "3600")
        yield running


async def busy_executor(running: Processes) -> str:
    """The only one that has a request."""
    executors = await running.wait_until(
        lambda all_: sum(e.num_running_requests for e in all_) == 1
    )
    return max(executors, key=lambda executor: executor.num_running_requests).address


async def test_stream_goes_on_elsewhere_when_its_executor_is_killed(
    running: Processes, gate: Gate
) -> None:
    async with AsyncClient(running.address, PATIENT) as client:
        await running.run_executors(2)
        stream = Stream()
        gate.slow_down(SLOW_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.run(client, PROMPT, PARAMS))
            await stream.started.wait()
            running.kill_executor(await busy_executor(running))
            gate.release()
        assert stream.tokens == TRUTH


async def test_executor_serves_again_when_its_requests_moved_while_it_was_paused(
    running: Processes, gate: Gate
) -> None:
    async with AsyncClient(running.address, PATIENT) as client:
        await running.run_executors(2)
        stream, later = Stream(), Stream()
        gate.slow_down(SLOW_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.run(client, PROMPT, PARAMS))
            await stream.started.wait()
            paused = await busy_executor(running)
            running.pause_executor(paused)
            gate.release()
        assert stream.tokens == TRUTH
        await running.wait_until(lambda all_: paused not in {e.address for e in all_})
        [other] = running.executors.keys() - {paused}

        running.resume_executor(paused)
        await running.wait_until(lambda all_: paused in {e.address for e in all_})
        running.kill_executor(other)
        await running.wait_until(lambda all_: {e.address for e in all_} == {paused})
        await later.run(client, PROMPT, PARAMS)
        assert later.tokens == TRUTH
