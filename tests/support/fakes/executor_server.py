"""The real servicer in this process, around any runner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from executor_service.service.servicer import SERVICE, Engine, ExecutorServicer
from executor_service.service.step_worker import StepWorker
from executor_service.steps.executor_info import ExecutorInfo
from executor_service.steps.step import Runner
from executor_service.steps.step_executor import StepExecutor
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.server import RunningServer, bind_server


@dataclass(frozen=True, slots=True)
class ExecutorServer:
    """A server that runs. `info` has its address."""

    info: ExecutorInfo
    servicer: ExecutorServicer
    worker: StepWorker
    running: RunningServer


async def start_executor(
    info: ExecutorInfo, runner: Runner, listen: str = "127.0.0.1:0"
) -> ExecutorServer:
    """Serves `runner` on `listen`, under the epoch and with the limits of `info`."""
    running = bind_server(listen, (SERVICE,), info.limits.max_message_bytes)
    info = replace(info, address=f"127.0.0.1:{running.port}")
    servicer = ExecutorServicer()
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    worker = StepWorker(StepExecutor(info, runner))
    servicer.serve(Engine(worker, lambda: info))
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
