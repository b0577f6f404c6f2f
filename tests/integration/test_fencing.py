"""Who may speak to an executor: schedulers whose clocks differ, and one that comes back late."""

from __future__ import annotations

import asyncio

from executor_service.service.encode_answer import encode_info
from splitserve_client import AsyncClient, SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.fake_service import DIGEST, StepWatch
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process

OLDER, NEWER = 1_000, 2_000
PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)


async def join(scheduler: SchedulerInProcess, executor: FakeExecutor) -> None:
    """The scheduler takes the executor, as if that had registered."""
    await scheduler.cluster.join(encode_info(executor.info))
    await connected(scheduler, 1)


async def connected(scheduler: SchedulerInProcess, num_executors: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(engine.is_connected for engine in scheduler.cluster.executors) != num_executors:
            scheduler.changed.clear()
            await scheduler.changed.wait()


async def test_scheduler_is_served_when_its_clock_was_set_back_before_it_started() -> None:
    async with FakeExecutor(digest=DIGEST) as executor:
        for epoch in (NEWER, OLDER, OLDER):
            async with (
                scheduler_in_process(scheduler_epoch=epoch) as scheduler,
                AsyncClient(scheduler.address, PATIENT) as client,
            ):
                await join(scheduler, executor)
                generation = await client.complete(PROMPT, PARAMS)
                assert generation.completions == expected_completions(PROMPT, PARAMS)
        assert executor.violations == []


async def test_former_scheduler_changes_nothing_when_it_comes_back_from_a_pause() -> None:
    watch = StepWatch()
    async with (
        FakeExecutor(digest=DIGEST, fault=watch) as executor,
        scheduler_in_process(scheduler_epoch=OLDER) as former,
        scheduler_in_process(scheduler_epoch=NEWER) as latter,
        AsyncClient(former.address, PATIENT) as client_of_former,
        AsyncClient(latter.address, PATIENT) as client,
    ):
        await join(former, executor)
        watch.hold(after=10)
        interrupted = asyncio.create_task(client_of_former.complete(PROMPT, PARAMS))
        await watch.wait_held()
        await join(latter, executor)
        completing = asyncio.create_task(client.complete([7, 8], PARAMS))
        watch.release()

        assert (await completing).completions == expected_completions([7, 8], PARAMS)
        # It was told that its place is taken, or that it is fenced off.
        await connected(former, 0)
        assert former.cluster.scheduler.num_waiting == 1
        later = await client.complete([9], PARAMS)
        assert later.completions == expected_completions([9], PARAMS)
        # Its request was not lost: it goes on with the executor that comes next.
        async with FakeExecutor(digest=DIGEST) as other:
            await join(former, other)
            assert (await interrupted).completions == expected_completions(PROMPT, PARAMS)
        assert executor.violations == []
