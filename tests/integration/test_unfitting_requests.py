"""What none of the executors could ever run is told apart from what waits for them."""

from __future__ import annotations

import asyncio

from splitserve_client import Generation, SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch, fake_service

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
