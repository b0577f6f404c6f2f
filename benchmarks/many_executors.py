"""Many executors in one process, which compute nothing and take their time for each step.

`python -m benchmarks.many_executors SCHEDULER NUM_EXECUTORS NUM_ROWS STEP_S`. For each line on
standard input it prints a JSON list: seconds between the beginnings of steps since the last line,
of all executors.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator

import grpc.aio

from benchmarks.null_executor import WireServicer
from executor_service.service import GrpcRegistry, RegistrationFailed
from executor_service.steps import ExecutorInfo, ExecutorLimits, ModelInfo
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc import bind_server

_RETRY_S = 0.2


class TimedServicer(WireServicer):
    """One step at a time, each of which takes `step_s` from when it could begin."""

    def __init__(self, info: ExecutorInfo, step_s: float, periods_s: list[float]) -> None:
        super().__init__(info)
        self._step_s = step_s
        self._periods_s = periods_s
        self.is_connected = False

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ScheduleBatch], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepResult]:
        """One result for each batch."""
        self.is_connected = True
        began_s: float | None = None
        async for result in super().Execute(request_iterator, context):
            now_s = time.perf_counter()
            if began_s is not None:
                self._periods_s.append(now_s - began_s)
            began_s = now_s
            if self._step_s:
                await asyncio.sleep(self._step_s)
            # What is moved where depends on what a step takes.
            result.timings.forward_us = int(1e6 * self._step_s)
            yield result


async def _start(
    scheduler: str, num_rows: int, step_s: float, periods_s: list[float]
) -> tuple[TimedServicer, object]:
    """An executor that the scheduler has connected to."""
    running = bind_server("127.0.0.1:0", ())
    info = ExecutorInfo(
        executor_epoch=time.time_ns(),
        model=ModelInfo("null", "0" * 64, "float32", "float32", 32_000, 1 << 16),
        block_size=16,
        num_device_blocks=num_rows * 32,
        num_host_blocks=0,
        block_bytes=1,
        limits=ExecutorLimits(num_rows, 1 << 24),
        address=f"127.0.0.1:{running.port}",
    )
    servicer = TimedServicer(info, step_s, periods_s)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    registry = GrpcRegistry(scheduler)
    while not servicer.is_connected:
        try:
            await registry.register(info)
        except RegistrationFailed as failure:
            if failure.reason:
                raise
        await asyncio.sleep(_RETRY_S)
    return servicer, running


async def serve(scheduler: str, num_executors: int, num_rows: int, step_s: float) -> None:
    """Serves until standard input ends."""
    periods_s: list[float] = []
    # One after the other: a scheduler lets few of a host wait.
    started = [await _start(scheduler, num_rows, step_s, periods_s) for _ in range(num_executors)]
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        sys.stdout.write(json.dumps(periods_s) + "\n")
        sys.stdout.flush()
        periods_s.clear()
    assert started


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
