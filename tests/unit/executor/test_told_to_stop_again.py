"""An executor that is told to stop once more does not wait for what it drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from executor_service import __main__ as executor_main
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import LoadedEngine
from executor_service.grammars.compiled_grammars import CompiledGrammars
from executor_service.steps.executor_info import ExecutorInfo, ModelInfo
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_options import options
from splitserve_rpc.peer_watch import Ask
from tests.support.fakes.fake_runner import FakeRunner
from tests.support.grammars.sampled_texts import byte_level_texts
from tests.support.steps.batches import NewRow, Sender, WorkRow, tokens_of


class ClingingScheduler:
    """Has an Execute stream open, and never lets the executor go."""

    def __init__(self) -> None:
        self.is_told_again = False
        self._held: list[object] = []

    def __call__(self, *_: object) -> ClingingScheduler:
        """In the place of GrpcRegistry."""
        return self

    async def register(self, info: ExecutorInfo) -> int:
        channel = grpc.aio.insecure_channel(info.address)
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
        batch = Sender(1, info.executor_epoch).batch(
            1, new=[NewRow(0, (0,))], work=[WorkRow(0, 0, [4, 2])]
        )
        await call.write(batch)
        assert len(tokens_of(await call.read())) == 1
        self._held += [channel, call]
        signal.raise_signal(signal.SIGTERM)
        return await asyncio.Event().wait()

    @asynccontextmanager
    async def questions(self) -> AsyncIterator[Ask]:
        yield self.is_answering

    async def is_answering(self) -> bool:
        return True

    async def leave(self, _: ExecutorInfo, timeout_s: float) -> None:
        assert timeout_s > 1000
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        self.is_told_again = True
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()


def load(*_: object) -> LoadedEngine:
    model = ModelInfo("m", "d", "float32", "float32", 10, 10)
    info = ExecutorInfo(1, model, 4, 8, 0, 1)
    grammars = CompiledGrammars(byte_level_texts().vocabulary)
    runner = FakeRunner(block_size=4, num_device_blocks=8)
    return LoadedEngine(runner, grammars, info, "", "cpu", "", {})


async def test_executor_ends_at_once_when_it_is_told_to_stop_again_while_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = ClingingScheduler()
    monkeypatch.setattr(executor_main, "GrpcRegistry", scheduler)
    monkeypatch.setattr(executor_main, "_load", load)
    flags = ["--listen=127.0.0.1:0", "--scheduler=127.0.0.1:1", "--drain-timeout-s=3600"]
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    # Otherwise it would take an hour.
    await executor_main.serve(config)

    assert scheduler.is_told_again
