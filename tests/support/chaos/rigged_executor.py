"""An executor process as it is, but for its runner, which is rigged, and perhaps its network.

The first argument is the pid of a process whose network it has, 0 for that which is there anyway;
the second is the path of the file that says how it is sick.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path

from executor_service import __main__ as executor
from executor_service import engine_loader
from executor_service.config import ExecutorConfig
from executor_service.service import encode_answer, step_worker
from executor_service.steps import StepAnswer
from splitserve.executor.v1 import executor_pb2
from tests.support.chaos.rigged_runner import RiggedRunner


def main() -> int:
    """The exit code of the executor. It is in a session of its own, as what it starts."""
    os.setsid()
    namespace, sickness = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    if namespace:
        _enter_network(namespace)
    load = engine_loader.load_engine

    def load_rigged(config: ExecutorConfig, executor_epoch: int) -> engine_loader.LoadedEngine:
        loaded = load(config, executor_epoch)
        rigged = RiggedRunner(loaded.runner, sickness)

        def tell(answer: StepAnswer) -> executor_pb2.StepResult:
            return encode_answer(rigged.answer(answer))

        step_worker.encode_answer = tell  # type: ignore[attr-defined]
        return replace(loaded, runner=rigged)

    engine_loader.load_engine = load_rigged
    return executor.main()


def _enter_network(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as network:
        if libc.setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
