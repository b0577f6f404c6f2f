"""An executor that is told to stop leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from executor_service import __main__ as executor_main
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import LoadedEngine
from executor_service.grammars.compiled_grammars import CompiledGrammars
from executor_service.steps.executor_info import ExecutorInfo, ModelInfo
from executor_service.steps.sampling_params import Grammar
from splitserve_options import options
from tests.support.fakes.fake_runner import FakeRunner
from tests.support.grammars.sampled_texts import byte_level_texts


def compiling() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "grammar-compiler" in thread.name}


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
            assert timeout_s < config.drain_timeout_s

    def load(*_: object) -> LoadedEngine:
        grammars = CompiledGrammars(byte_level_texts().vocabulary)
        grammars.add(0, Grammar("regex", ("a",)), [1, 2], 2)
        runner = FakeRunner(block_size=4, num_device_blocks=8)
        model = ModelInfo("m", "d", "float32", "float32", 10, 10)
        info = ExecutorInfo(1, model, 4, 8, 0, 1)
        return LoadedEngine(runner, grammars, info, "", "cpu", "", {})

    monkeypatch.setattr(executor_main, "stop_event", lambda *_: stop)
    monkeypatch.setattr(executor_main, "GrpcRegistry", Registry)
    monkeypatch.setattr(executor_main, "_load", load)
    flags = ["--listen=127.0.0.1:0", "--scheduler=127.0.0.1:1"]
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    await executor_main.serve(config)

    assert compiling() == before
