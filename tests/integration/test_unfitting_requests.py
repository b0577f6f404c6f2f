"""What none of the executors could ever run is told apart from what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from executor_service.steps.executor_info import SAMPLING_FEATURES, Feature
from splitserve_client import Choices, Generation, InvalidRequest, SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

LONG = SamplingParams(seed=3, max_tokens=60)
SHORT = SamplingParams(seed=4, max_tokens=4)


async def test_what_fits_no_executor_is_counted_apart_until_one_comes_that_can_run_it() -> None:
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


async def test_requests_wait_alike_when_the_only_executor_that_can_run_them_was_lost() -> None:
    async with only_capable_executor_lost(executor_return_s=3600) as (service, capable, running):
        new = asyncio.create_task(service.client.complete([3, 4, 5], CHOICES))
        await service.wait_for(lambda listed: listed.num_unfitting_requests == 2)

        await capable.start()

        assert (await running).completions == (await new).completions


async def test_requests_end_alike_when_the_executor_that_can_run_them_stays_away() -> None:
    async with only_capable_executor_lost(executor_return_s=0.2) as (service, _, running):
        with pytest.raises(InvalidRequest, match="cannot do grammar; none that could came back"):
            await running
        with pytest.raises(InvalidRequest, match="cannot do grammar"):
            await service.client.complete([3, 4, 5], CHOICES)
        await service.client.complete([3, 4, 5], SHORT)
