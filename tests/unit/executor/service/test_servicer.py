from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import grpc.aio
import pytest

from executor_service.service.servicer import ExecutorServicer, ReadyExecutor
from executor_service.service.step_worker import StepWorker
from executor_service.steps.batch import Batch, StepAnswer
from executor_service.steps.executor_info import ExecutorInfo, ModelInfo
from executor_service.steps.step_executor import RunningStep, StepExecutor
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.errors import failure_of
from splitserve_rpc.server import bind_server
from tests.support.fakes.fake_runner import FakeRunner

INFO = ExecutorInfo(
    executor_epoch=1,
    model=ModelInfo("m", "d", "float32", "float32", 128, 64),
    block_size=4,
    num_device_blocks=16,
    num_host_blocks=0,
    block_bytes=1,
)
MIB = 1024 * 1024


@pytest.fixture
async def servicer_and_stub() -> AsyncIterator[
    tuple[ExecutorServicer, executor_pb2_grpc.ExecutorServiceStub]
]:
    running = bind_server("127.0.0.1:0", ())
    servicer = ExecutorServicer()
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield servicer, executor_pb2_grpc.ExecutorServiceStub(channel)
    await servicer.drain()
    await running.server.stop(None)


Pair = tuple[ExecutorServicer, executor_pb2_grpc.ExecutorServiceStub]


def _serve(servicer: ExecutorServicer, files: Mapping[str, Path]) -> None:
    runner = FakeRunner(block_size=4, num_device_blocks=16)
    servicer.serve(ReadyExecutor(StepWorker(StepExecutor(INFO, runner)), lambda: INFO, files))


async def test_tokenizer_comes_in_chunks_of_a_mebibyte_when_it_is_large(
    servicer_and_stub: Pair, tmp_path: Path
) -> None:
    servicer, stub = servicer_and_stub
    (tmp_path / "tokenizer.json").write_bytes(b"x" * MIB + b"yz")
    (tmp_path / "rag.jinja").write_bytes(b"")
    name = "additional_chat_templates/rag.jinja"
    paths = {"tokenizer.json": tmp_path / "tokenizer.json", name: tmp_path / "rag.jinja"}
    _serve(servicer, paths)
    chunks = [chunk async for chunk in stub.GetTokenizer(pb.GetTokenizerRequest())]
    assert [(chunk.file_name, len(chunk.data), chunk.data[-2:]) for chunk in chunks] == [
        ("tokenizer.json", MIB, b"xx"),
        ("tokenizer.json", 2, b"yz"),
        (name, 0, b""),
    ]


async def test_rpcs_are_refused_when_the_model_is_not_loaded_yet(servicer_and_stub: Pair) -> None:
    _, stub = servicer_and_stub
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetInfo(pb.GetInfoRequest())
    assert failure_of(caught.value).reason == "MODEL_NOT_READY"


async def test_executor_says_that_it_was_sent_away(servicer_and_stub: Pair) -> None:
    servicer, stub = servicer_and_stub
    worker = StepWorker(StepExecutor(INFO, FakeRunner(block_size=4, num_device_blocks=16)))
    said = []
    for is_drained in (False, True):
        servicer.serve(ReadyExecutor(worker, lambda: INFO, is_drained=lambda: is_drained))  # noqa: B023
        said.append((await stub.GetInfo(pb.GetInfoRequest())).drained)
    assert said == [False, True]


async def test_nobody_watches_when_the_only_stream_was_closed(servicer_and_stub: Pair) -> None:
    servicer, stub = servicer_and_stub
    _serve(servicer, {})
    call = stub.Execute()
    await call.write(pb.ScheduleBatch(scheduler_epoch=1, executor_epoch=1, step_id=1))
    await call.read()
    nobody_watches = asyncio.create_task(servicer.streams.wait_none_open())
    await asyncio.sleep(0)
    assert not nobody_watches.done()
    call.cancel()
    await nobody_watches


class _Broken(StepExecutor):
    def begin(
        self, batch: Batch, then: Callable[[StepAnswer], None], queue_us: int = 0
    ) -> RunningStep | None:
        raise RuntimeError("a bug of ours")


async def test_batch_gets_a_result_when_we_have_a_bug(servicer_and_stub: Pair) -> None:
    servicer, stub = servicer_and_stub
    runner = FakeRunner(block_size=4, num_device_blocks=16)
    servicer.serve(ReadyExecutor(StepWorker(_Broken(INFO, runner)), lambda: INFO))
    call = stub.Execute()
    for step_id in (1, 2):
        await call.write(pb.ScheduleBatch(scheduler_epoch=1, executor_epoch=1, step_id=step_id))
    results = [await call.read(), await call.read()]
    call.cancel()
    assert [(r.step_id, r.status, r.error.reason) for r in results] == [
        (step_id, pb.STEP_STATUS_FAILED, pb.STEP_ERROR_REASON_INTERNAL) for step_id in (1, 2)
    ]
