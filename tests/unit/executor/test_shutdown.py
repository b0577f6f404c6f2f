"""An executor that is told to stop leaves nothing behind, and told again does not wait."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from executor_service import __main__ as executor_main
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import LoadedEngine
from executor_service.grammars import CompiledGrammars
from executor_service.steps import ExecutorInfo, Grammar
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_options import options
from splitserve_rpc import Ask
from tests.support.fakes.fake_runner import FakeRunner
from tests.support.grammars.sampled_texts import byte_level_texts
from tests.support.processes.patience import PATIENCE_S
from tests.support.steps.batches import NewRow, Sender, WorkRow, tokens_of
from tests.support.steps.step_driver import make_executor_info


def compiling() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "grammar-compiler" in thread.name}


def load(*_: object) -> LoadedEngine:
    grammars = CompiledGrammars(byte_level_texts().vocabulary)
    grammars.add(0, Grammar("regex", ("a",)), [1, 2], 2)
    runner = FakeRunner(block_size=4, num_device_blocks=8)
    return LoadedEngine(runner, grammars, make_executor_info(), "", "cpu", "", {})


async def serve(monkeypatch: pytest.MonkeyPatch, registry: object, *flags: str) -> None:
    """Serves a fake engine until `registry` stops it; nobody else answers for a scheduler."""
    monkeypatch.setattr(executor_main, "GrpcRegistry", registry)
    monkeypatch.setattr(executor_main, "_load", load)
    addresses = ["--listen=127.0.0.1:0", "--scheduler=127.0.0.1:1"]
    values = options.parse("executor", [*addresses, *flags], {})
    await executor_main.serve(ExecutorConfig.from_options(values))


async def test_nothing_compiles_grammars_when_the_executor_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, before = asyncio.Event(), compiling()

    class Registry:
        def __init__(self, *_: object) -> None: ...

        async def register(self, _: ExecutorInfo) -> int:
            assert len(compiling() - before) == 2
            stop.set()
            return await asyncio.Event().wait()

        async def leave(self, _: ExecutorInfo, timeout_s: float) -> None:
            assert timeout_s < 60

    monkeypatch.setattr(executor_main, "stop_event", lambda *_: stop)
    await serve(monkeypatch, Registry, "--drain-timeout-s=60")
    # A thread that was compiling ends soon after.
    for thread in compiling() - before:
        thread.join(PATIENCE_S)
    assert compiling() == before


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


async def test_executor_ends_at_once_when_it_is_stopped_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = ClingingScheduler()
    # Otherwise it would take an hour.
    await serve(monkeypatch, scheduler, "--drain-timeout-s=3600")
    assert scheduler.is_told_again
