"""The real executor servicer in this process, around any runner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from executor_service.service.servicer import SERVICE, ExecutorServicer, ReadyExecutor
from executor_service.service.step_worker import Encode, StepWorker
from executor_service.steps.executor_info import ExecutorInfo
from executor_service.steps.step import Runner
from executor_service.steps.step_executor import StepExecutor
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.server import OPEN, RunningServer, ServerSecurity, bind_server


class CountingWorker(StepWorker):
    """Knows how many batches were read."""

    num_submitted = 0

    def submit(self, batch: pb.ScheduleBatch, then: Callable[[Encode], None]) -> None:
        super().submit(batch, then)
        self.num_submitted += 1


@dataclass(frozen=True, slots=True)
class ExecutorServer:
    """A server that runs. `info` has its address."""

    info: ExecutorInfo
    servicer: ExecutorServicer
    worker: CountingWorker
    running: RunningServer


async def start_executor(
    info: ExecutorInfo,
    runner: Runner,
    listen: str = "127.0.0.1:0",
    tokenizer_files: Mapping[str, Path] | None = None,
    security: ServerSecurity = OPEN,
) -> ExecutorServer:
    """Serves `runner` on `listen`, under the epoch and with the limits of `info`."""
    running = bind_server(listen, (SERVICE,), info.limits.max_message_bytes, security=security)
    info = replace(info, address=f"127.0.0.1:{running.port}")
    servicer = ExecutorServicer()
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    worker = CountingWorker(StepExecutor(info, runner))
    servicer.serve(ReadyExecutor(worker, lambda: worker.describe(info), tokenizer_files or {}))
    await running.server.start()
    return ExecutorServer(info, servicer, worker, running)


@asynccontextmanager
async def serve_executor(info: ExecutorInfo, runner: Runner) -> AsyncIterator[ExecutorServer]:
    """An executor on a free port, drained at the end."""
    server = await start_executor(info, runner)
    try:
        yield server
    finally:
        await server.servicer.drain()
        await server.running.server.stop(grace=1.0)
