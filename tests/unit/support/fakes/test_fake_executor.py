from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from executor_service.steps.executor_info import Feature
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_registry import FakeRegistry, fake_registry
from tests.support.fakes.fake_runner import expected_tokens
from tests.support.steps.batches import NewRow, Sender, WorkRow, tokens_of


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[FakeRegistry, str]]:
    async with fake_registry() as serving:
        yield serving


async def test_executor_registers_when_it_starts(scheduler: tuple[FakeRegistry, str]) -> None:
    servicer, address = scheduler
    async with FakeExecutor(address, block_size=8) as executor:
        info = await servicer.registered.get()
        assert (info.address, info.block_size_tokens) == (executor.address, 8)


async def test_executor_has_a_newer_epoch_at_the_same_address_when_it_starts_again(
    scheduler: tuple[FakeRegistry, str],
) -> None:
    _, address = scheduler
    async with FakeExecutor(address) as executor:
        first = executor.info
        await executor.kill()
        await executor.start()
        assert executor.address == first.address
        assert executor.info.executor_epoch > first.executor_epoch


async def test_executor_computes_when_it_gets_a_batch() -> None:
    async with FakeExecutor() as executor:
        sender = Sender(1, executor.info.executor_epoch)
        batch = sender.batch(1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, [4, 2])])
        async with grpc.aio.insecure_channel(executor.address) as channel:
            call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
            await call.write(batch)
            assert tokens_of(await call.read()) == expected_tokens([4, 2], 1, 0, 128)


async def test_executor_announces_what_it_is_given_when_that_is_more_than_sampling() -> None:
    features = frozenset(Feature)
    async with FakeExecutor(features=features, sliding_window_tokens=6) as executor:
        sender = Sender(1, executor.info.executor_epoch)
        new = [NewRow(0, (0,), adapter="a", cross_blocks=(1,), encoder=(5, 6))]
        batch = sender.batch(1, new=new, work=[WorkRow(0, 0, [4, 2])])
        async with grpc.aio.insecure_channel(executor.address) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            info = (await stub.GetInfo(pb.GetInfoRequest())).executor
            call = stub.Execute()
            await call.write(batch)
            tokens = tokens_of(await call.read())
        assert (info.model.sliding_window_tokens, info.limits.max_adapters_per_step) == (6, 4)
        assert tokens == expected_tokens([4, 2], 1, 0, 128, adapter="a", encoder=(5, 6), window=6)
        assert executor.violations == []


async def test_stream_breaks_when_the_executor_is_killed() -> None:
    async with FakeExecutor() as executor:
        sender = Sender(1, executor.info.executor_epoch)
        async with grpc.aio.insecure_channel(executor.address) as channel:
            call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
            await call.write(sender.batch(1))
            await call.read()
            await executor.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
