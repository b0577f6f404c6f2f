"""Tests executors that hang, cannot run a request, or are asked by two schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from executor_service.service import encode_info
from executor_service.steps import SAMPLING_FEATURES, Feature
from splitserve_client import AsyncClient, Choices, Generation, InvalidRequest, SamplingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import DIGEST, FakeService, StepWatch, fake_service
from tests.support.processes.patience import PATIENT
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process

PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
# More than it takes to know what steps take.
NUM_STEPS = 20


async def test_stream_goes_on_elsewhere_when_a_step_hangs() -> None:
    watches = [StepWatch(), StepWatch()]
    executors = [FakeExecutor(fault=watch) for watch in watches]
    # On a busy machine a step may take longer than that now and then: it fails nobody.
    options = {"step_patience_s": 0.2, "step_timeout_s": 3600, "max_executor_losses": 64}
    async with fake_service(*executors, **options) as service:
        for watch in watches:
            watch.hold(after=NUM_STEPS)
        completing = asyncio.create_task(service.client.complete(PROMPT, PARAMS))
        held = [asyncio.ensure_future(watch.wait_held()) for watch in watches]
        await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        hung, other = (0, 1) if held[0].done() else (1, 0)
        held[other].cancel()
        watches[other].release()

        assert (await completing).completions == expected_completions(PROMPT, PARAMS)

        assert len(watches[hung].steps) == NUM_STEPS + 1
        watches[hung].release()
        await service.wait_connected(2)
        later = await asyncio.gather(
            *(service.client.complete([number], PARAMS) for number in range(6))
        )
        assert [generation.completions for generation in later] == [
            expected_completions([number], PARAMS) for number in range(6)
        ]


LONG = SamplingParams(seed=3, max_tokens=60)
SHORT = SamplingParams(seed=4, max_tokens=4)


async def test_unfitting_requests_are_counted_apart() -> None:
    watches = StepWatch(), StepWatch()
    large, small = FakeExecutor(fault=watches[0]), FakeExecutor(num_device_blocks=8)
    small.fault = watches[1]
    async with fake_service(large, small, max_num_seqs=1) as service:
        client = service.client
        for watch in watches:
            watch.hold()
        long = [asyncio.create_task(client.complete([9] * 40, LONG)) for _ in range(4)]
        await watches[0].wait_held()
        short = [asyncio.create_task(client.complete([1], SHORT)) for _ in range(2)]
        await watches[1].wait_held()
        await service.wait_for(
            lambda listed: sum(each.num_waiting_requests for each in listed.executors) == 4
        )
        listed = await client.list_executors()
        assert (listed.num_unassigned_requests, listed.num_unfitting_requests) == (0, 0)

        assert (await client.drain_executor(large.address, 0)).num_moved_requests == 1
        listed = await client.list_executors()
        assert (listed.num_unassigned_requests, listed.num_unfitting_requests) == (4, 4)
        (executor,) = listed.executors
        assert (executor.num_running_requests, executor.num_waiting_requests) == (1, 1)

        for watch in watches:
            watch.release()
        await asyncio.gather(*short)
        await large.stop()
        await large.start()
        found: list[Generation] = await asyncio.gather(*long)
        assert [len(each.completions[0].token_ids) for each in found] == 4 * [60]
        listed = await client.list_executors()
        assert (listed.num_unassigned_requests, listed.num_unfitting_requests) == (0, 0)


CHOICES = SamplingParams(seed=2, max_tokens=20, grammar=Choices(("5 9 12 13", "30 31 32")))


@asynccontextmanager
async def only_capable_executor_lost(
    executor_return_s: float,
) -> AsyncIterator[tuple[FakeService, FakeExecutor, asyncio.Task[Generation]]]:
    """One of two executors can do grammars, and is lost while it runs the request that is given."""
    watch = StepWatch()
    capable = FakeExecutor(
        features=SAMPLING_FEATURES | {Feature.GRAMMAR}, eos_token_ids=(1,), fault=watch
    )
    plain = FakeExecutor(eos_token_ids=(1,))
    async with fake_service(capable, plain, executor_return_s=executor_return_s) as service:
        watch.hold(after=1)
        running = asyncio.create_task(service.client.complete([3, 4, 5], CHOICES))
        await watch.wait_held()
        await service.kill(capable, watch)
        yield service, capable, running


async def test_requests_wait_when_their_only_executor_was_lost() -> None:
    async with only_capable_executor_lost(executor_return_s=3600) as (service, capable, running):
        new = asyncio.create_task(service.client.complete([3, 4, 5], CHOICES))
        await service.wait_for(lambda listed: listed.num_unfitting_requests == 2)

        await capable.start()

        assert (await running).completions == (await new).completions


async def test_requests_end_when_their_only_executor_stays_away() -> None:
    async with only_capable_executor_lost(executor_return_s=0.2) as (service, _, running):
        with pytest.raises(InvalidRequest, match="do not support grammar; no suitable executor"):
            await running
        with pytest.raises(InvalidRequest, match="do not support grammar"):
            await service.client.complete([3, 4, 5], CHOICES)
        await service.client.complete([3, 4, 5], SHORT)


OLDER, NEWER = 1_000, 2_000


async def join(scheduler: SchedulerInProcess, executor: FakeExecutor) -> None:
    """The scheduler takes the executor, as if that had registered."""
    await scheduler.cluster.join(encode_info(executor.info))
    await scheduler.wait_connected(1)


async def test_scheduler_is_served_when_its_clock_was_set_back() -> None:
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


async def test_former_scheduler_is_fenced_off_after_a_pause() -> None:
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
        await former.wait_connected(0)
        assert former.cluster.scheduler.num_waiting == 1
        later = await client.complete([9], PARAMS)
        assert later.completions == expected_completions([9], PARAMS)
        # Its request was not lost: it goes on with the executor that comes next.
        async with FakeExecutor(digest=DIGEST) as other:
            await join(former, other)
            assert (await interrupted).completions == expected_completions(PROMPT, PARAMS)
        assert executor.violations == []
