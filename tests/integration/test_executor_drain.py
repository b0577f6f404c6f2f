"""Tests executors that leave while they serve, and the command `splitserve drain`."""

from __future__ import annotations

import asyncio
import re
import subprocess
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_client import (
    BeamSearch,
    ExecutorList,
    Generation,
    InvalidRequest,
    SamplingParams,
    SplitserveError,
)
from splitserve_rpc import failure_of
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service
from tests.support.processes.forked import run_process
from tests.support.processes.patience import PATIENCE_S

PARAMS = SamplingParams(seed=3, max_tokens=40)
KINDS = (
    PARAMS,
    replace(PARAMS, n=3),
    replace(PARAMS, n=2, best_of=3, num_logprobs=1),
    replace(PARAMS, beam_search=BeamSearch(3)),
)
REQUESTS = [([number, 7, 9], KINDS[number % len(KINDS)]) for number in range(12)]
FOREVER_S = 3600


async def complete(service: FakeService, number: int) -> None:
    prompt, params = REQUESTS[number]
    generation: Generation = await service.client.complete(prompt, params)
    found = [replace(completion, logprobs=()) for completion in generation.completions]
    assert tuple(found) == expected_completions(prompt, params)


async def start_all(service: FakeService, *watches: StepWatch) -> list[asyncio.Task[None]]:
    """All of REQUESTS, of which some run and some wait; every executor holds a step."""
    for watch in watches:
        watch.hold(after=6)
    completing = [asyncio.create_task(complete(service, number)) for number in range(len(REQUESTS))]
    for watch in watches:
        await watch.wait_held()
    await service.wait_for(lambda listed: num_requests(listed) == len(REQUESTS))
    return completing


def num_requests(listed: ExecutorList) -> int:
    return listed.num_unassigned_requests + sum(
        e.num_running_requests + e.num_waiting_requests + e.num_swapped_requests
        for e in listed.executors
    )


def small(watch: StepWatch) -> FakeExecutor:
    return FakeExecutor(num_device_blocks=48, num_host_blocks=32, fault=watch)


async def test_drain_moves_what_waits_and_ends_what_runs() -> None:
    watches = StepWatch(), StepWatch()
    going, staying = small(watches[0]), small(watches[1])
    async with fake_service(going, staying, max_num_seqs=4) as service:
        completing = await start_all(service, *watches)
        draining = asyncio.create_task(service.client.drain_executor(going.address, FOREVER_S))
        listed = await service.wait_for(lambda listed: state_of(listed, going).is_draining)
        during = state_of(listed, going)
        assert (during.num_waiting_requests, during.num_swapped_requests) == (0, 0)
        assert during.num_running_requests > 0
        assert not draining.done()

        for watch in watches:
            watch.release()
        assert not (await draining).is_lost
        await asyncio.gather(*completing)
        (left,) = (await service.client.list_executors()).executors
        assert left.address == staying.address


def state_of(listed: ExecutorList, executor: FakeExecutor):  # type: ignore[no-untyped-def]  # noqa: ANN201
    return next(e for e in listed.executors if e.address == executor.address)


async def test_requests_wait_when_the_last_executor_is_drained() -> None:
    watch = StepWatch()
    executor = small(watch)
    async with fake_service(executor) as service:
        completing = await start_all(service, watch)
        drained = await service.client.drain_executor(executor.address, 0)
        assert drained.num_moved_requests > 0
        listed = await service.client.list_executors()
        assert (listed.executors, listed.num_unassigned_requests) == ((), len(REQUESTS))
        assert not await service.client.is_serving()

        watch.release()
        await executor.stop()
        await executor.start()
        await asyncio.gather(*completing)


async def test_executor_leaves_when_it_is_told_to_stop() -> None:
    watch = StepWatch()
    going = small(watch)
    async with fake_service(going, FakeExecutor()) as service:
        completing = await start_all(service, watch)
        leaving = asyncio.create_task(going.leave(FOREVER_S))
        await service.wait_for(lambda listed: state_of(listed, going).is_draining)
        assert not leaving.done()
        watch.release()
        await leaving
        await asyncio.gather(*completing)


@pytest.mark.parametrize("has_time", [True, False])
async def test_executor_goes_in_its_own_time_when_no_scheduler_answers(has_time: bool) -> None:
    executor = FakeExecutor()
    async with fake_service(executor) as service:
        service.scheduler.process.kill()
        service.scheduler.process.wait()
        await asyncio.wait_for(executor.leave(FOREVER_S if has_time else 0.01), PATIENCE_S)


async def test_nobody_is_sent_away_when_another_says_that_it_leaves() -> None:
    executor = FakeExecutor()
    async with fake_service(executor) as service:
        epoch = executor.info.executor_epoch
        assert await leave(service, executor.address, epoch) == "EXECUTOR_MISMATCH"
        assert await leave(service, executor.address, epoch - 1) == ""
        assert await leave(service, "127.0.0.1:9", epoch) == ""
        assert await leave(service, "a" * 301, epoch) == "EXECUTOR_INFO_INVALID"
        assert await leave(service, executor.address, epoch, -1) == "DRAIN_TIMEOUT_INVALID"
        await complete(service, 0)
        assert not state_of(await service.client.list_executors(), executor).is_draining


async def leave(service: FakeService, address: str, epoch: int, timeout_s: int = 1) -> str:
    """The reason of the refusal, if it was one."""
    request = registry_pb2.LeaveRequest(
        address=address, executor_epoch=epoch, timeout=Duration(seconds=timeout_s)
    )
    async with grpc.aio.insecure_channel(service.scheduler.address) as channel:
        try:
            await registry_pb2_grpc.RegistryServiceStub(channel).Leave(request, timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            return failure_of(error).reason
    return ""


async def test_drain_is_refused_by_name_when_it_makes_no_sense() -> None:
    executor = FakeExecutor()
    async with fake_service(executor) as service:
        with pytest.raises(SplitserveError) as refused:
            await service.client.drain_executor("127.0.0.1:9")
        assert refused.value.reason == "EXECUTOR_UNKNOWN"
        assert executor.address in refused.value.message
        for timeout_s in (-1, 3601, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest, match="timeout"):
                await service.client.drain_executor(executor.address, timeout_s)
        await service.wait_connected(1)


async def drain(service: FakeService, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `splitserve drain` to its end."""
    arguments = ("drain", *arguments, "--address", service.scheduler.address)
    return await asyncio.to_thread(run_process, "splitserve_cli", *arguments)


async def test_command_moves_streams_and_names_each_executor() -> None:
    watches = [StepWatch() for _ in range(3)]
    going = [FakeExecutor(fault=watch) for watch in watches[:2]]
    staying = FakeExecutor(fault=watches[2])
    async with fake_service(*going, staying) as service:
        for watch in watches:
            watch.hold(after=3)
        completing = [asyncio.create_task(complete(service, number)) for number in range(9)]
        for watch in watches:
            await watch.wait_held()

        # Their steps are held: nothing ends there any more, all has to move.
        addresses = [executor.address for executor in going]
        done = await drain(service, *addresses, addresses[0], "--timeout-s", "0")

        assert (done.returncode, done.stderr) == (0, "")
        moved = re.findall(r"^(\S+) drained, (\d+) requests moved$", done.stdout, re.MULTILINE)
        assert {address for address, _ in moved} == set(addresses)
        assert len(moved) == len(done.stdout.splitlines()) == 2
        assert all(int(number) > 0 for _, number in moved)
        (left,) = (await service.client.list_executors()).executors
        assert left.address == staying.address

        for watch in watches:
            watch.release()
        await asyncio.gather(*completing)


async def test_command_names_executors_that_it_could_not_drain() -> None:
    executors = FakeExecutor(), FakeExecutor()
    async with fake_service(*executors) as service:
        unknown = reserve_address()
        done = await drain(service, unknown, executors[0].address)
        assert done.returncode == 1
        assert done.stdout == f"{executors[0].address} drained, 0 requests moved\n"
        assert done.stderr.startswith(f"splitserve drain: {unknown}: ")
        assert done.stderr.endswith(" [EXECUTOR_UNKNOWN]\n")
        assert done.stderr.count("\n") == 1
        too_long = await drain(service, executors[1].address, "--timeout-s=3601")
        assert (too_long.returncode, too_long.stdout, "timeout" in too_long.stderr) == (1, "", True)


async def test_command_takes_back_whom_it_sent_away() -> None:
    going, staying = FakeExecutor(), FakeExecutor()
    async with fake_service(going, staying) as service:
        assert (await drain(service, going.address)).returncode == 0
        await service.wait_connected(1)
        done = await drain(service, "--undo", going.address)
        assert (done.returncode, done.stdout, done.stderr) == (
            0,
            f"{going.address} no longer drains\n",
            "",
        )
        await service.wait_connected(2)
        unknown = reserve_address()
        done = await drain(service, "--undo", unknown)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith(" [EXECUTOR_UNKNOWN]\n")
