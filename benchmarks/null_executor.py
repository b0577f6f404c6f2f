"""An executor process that computes nothing: what is left is the wire. Prints its address."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import numpy as np

from executor_service.executor_info import ExecutorInfo, ExecutorLimits, ModelInfo
from executor_service.servicer import SERVICE, Engine, ExecutorServicer
from executor_service.step import RowStatus, StepInput, StepOutput
from executor_service.step_executor import StepExecutor
from executor_service.step_worker import StepWorker
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.server import bind_server


class NullRunner:
    """Samples token 7 for every row that samples."""

    def execute(self, step: StepInput) -> StepOutput:
        """Touches nothing."""
        return StepOutput(
            np.full(step.num_rows, RowStatus.OK, np.uint8),
            np.where(step.samples, 7, -1).astype(np.int32),
        )


async def serve(num_rows: int) -> None:
    """Serves until terminated."""
    info = ExecutorInfo(
        executor_epoch=1,
        model=ModelInfo("null", "null", "float32", "float32", 32_000, 1 << 20),
        block_size=16,
        num_device_blocks=num_rows * 200,
        num_host_blocks=0,
        block_bytes=1,
        limits=ExecutorLimits(num_rows, 1 << 24),
    )
    running = bind_server("127.0.0.1:0", (SERVICE,))
    servicer = ExecutorServicer()
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    address = f"127.0.0.1:{running.port}"
    info = replace(info, address=address)
    servicer.serve(Engine(StepWorker(StepExecutor(info, NullRunner())), lambda: info))
    await running.server.start()
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    await running.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
