"""An executor process that computes nothing. Prints its address.

`wire`: batches are decoded into columns, results are encoded, and that is all. `executor`: the real
servicer around a runner that does nothing: identity, validation, row table and worker thread too.
A third argument is a directory of `splitserve certs`: it then speaks TLS, to schedulers alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import numpy as np

from executor_service.service import (
    SERVICE,
    ExecutorServicer,
    ReadyExecutor,
    StepWorker,
    decode_batch,
    encode_answer,
    encode_info,
)
from executor_service.steps import (
    Batch,
    BatchContent,
    ExecutorInfo,
    ExecutorLimits,
    FinishedStep,
    ModelInfo,
    RowStatus,
    StepAnswer,
    StepExecutor,
    StepInput,
    StepOutput,
    StepStatus,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc import NOBODY, Access, ClusterIdentity, ServerSecurity, bind_server
from tests.support.security.cluster import Certificates


class NullRunner:
    """Samples token 7 for every row that samples."""

    def begin(self, step: StepInput) -> FinishedStep:
        """Touches nothing."""
        return FinishedStep(
            StepOutput(
                np.full(step.num_rows, RowStatus.OK, np.uint8),
                np.where(step.samples, 7, -1).astype(np.int32),
            )
        )


class WireServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Answers every batch at once."""

    def __init__(self, info: ExecutorInfo) -> None:
        self._info = info

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Says what it is."""
        return pb.GetInfoResponse(executor=encode_info(self._info))

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ScheduleBatch], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepResult]:
        """One result for each batch."""
        async for message in request_iterator:
            yield encode_answer(_answer(decode_batch(message)))


def _answer(batch: Batch) -> StepAnswer:
    assert isinstance(batch.content, BatchContent)
    num_rows = len(batch.content.work.row_ids)
    output = StepOutput(np.full(num_rows, RowStatus.OK, np.uint8), np.full(num_rows, 7, np.int32))
    identity = batch.identity
    return StepAnswer(
        identity.scheduler_epoch,
        identity.executor_epoch,
        identity.step_id,
        StepStatus.OK,
        output=output,
    )


async def serve(mode: str, num_rows: int, identity: ClusterIdentity = NOBODY) -> None:
    """Serves until terminated."""
    security = ServerSecurity(Access(identity), identity.tls)
    running = bind_server("127.0.0.1:0", (SERVICE,), security=security)
    info = ExecutorInfo(
        executor_epoch=1,
        model=ModelInfo("null", "null", "float32", "float32", 32_000, 1 << 20),
        block_size=16,
        num_device_blocks=num_rows * 200,
        num_host_blocks=0,
        block_bytes=1,
        limits=ExecutorLimits(num_rows, 1 << 24),
        address=f"127.0.0.1:{running.port}",
    )
    if mode == "wire":
        wire = WireServicer(info)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(wire, running.server)
    else:
        servicer = ExecutorServicer()
        servicer.serve(ReadyExecutor(StepWorker(StepExecutor(info, NullRunner())), lambda: info))
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    sys.stdout.write(info.address + "\n")
    sys.stdout.flush()
    await running.server.wait_for_termination()


if __name__ == "__main__":
    is_somebody = len(sys.argv) > 3
    identity = Certificates(Path(sys.argv[3])).identity("executor") if is_somebody else NOBODY
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), identity))
