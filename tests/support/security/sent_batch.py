"""A batch for an executor, by whomever."""

from __future__ import annotations

import grpc.aio

from splitserve.executor.v1 import executor_pb2
from splitserve_rpc.errors import failure_of
from tests.support.processes.patience import PATIENCE_S

_EXECUTE = "/splitserve.executor.v1.ExecutorService/Execute"


async def refusal_of_batch(channel: grpc.aio.Channel, batch: executor_pb2.ScheduleBatch) -> str:
    """The reason or the status for which the call is refused; empty if it is answered.

    The batch goes with the call: whoever writes to a stream that has ended already is told of that,
    and not why.
    """
    call = channel.unary_stream(_EXECUTE)(batch.SerializeToString(), timeout=PATIENCE_S)
    try:
        async for _ in call:
            break
    except grpc.aio.AioRpcError as error:
        return failure_of(error).reason or error.code().name
    return ""
