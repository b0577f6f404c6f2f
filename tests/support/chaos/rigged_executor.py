"""Executor processes that begin at once: forked off one that has imported torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LOADER = "executor_service.engine_loader"


def start_executor(options: list[str], log: Path, namespace: int | None) -> ForkServerProcess:
    """An executor with `options` and a rigged runner, which appends what it says to `log`.

    `namespace`: of this process it has the network; None: that which is there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_LOADER])
    process = context.Process(target=_run, args=(options, log, namespace), daemon=True)
    process.start()
    return process


def _run(options: list[str], log: Path, namespace: int | None) -> None:
    """What the process does."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if namespace is not None:
        with open(f"/proc/{namespace}/ns/net", "rb") as network:
            if libc.setns(network.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    for name in [name for name in os.environ if name.startswith("SPLITSERVE_")]:
        del os.environ[name]

    from executor_service import __main__ as executor
    from executor_service import engine_loader
    from executor_service.config import ExecutorConfig
    from executor_service.service import step_worker
    from executor_service.service.encode_answer import encode_answer
    from executor_service.steps.batch import StepAnswer
    from splitserve.executor.v1 import executor_pb2
    from tests.support.chaos.rigged_runner import RiggedRunner

    load = engine_loader.load_engine

    def load_rigged(config: ExecutorConfig, executor_epoch: int) -> engine_loader.LoadedEngine:
        loaded = load(config, executor_epoch)
        rigged = RiggedRunner(loaded.runner)

        def tell(answer: StepAnswer) -> executor_pb2.StepResult:
            return encode_answer(rigged.answer(answer))

        step_worker.encode_answer = tell  # type: ignore[attr-defined]
        return replace(loaded, runner=rigged)  # type: ignore[arg-type]

    engine_loader.load_engine = load_rigged
    sys.argv = ["executor_service", *options]
    sys.exit(executor.main())
