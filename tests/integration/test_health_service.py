"""Health may be asked by anybody: what strangers say is not kept, and their streams are few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve_rpc.errors import RpcFailure, failure_of
from splitserve_rpc.health_service import MAX_WATCHES
from splitserve_rpc.server import bind_server
from tests.support.processes.patience import PATIENCE_S

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    running = bind_server("127.0.0.1:0", ())
    await running.server.start()
    await running.set_serving(["a.Service"], serving=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield channel
    await running.stop(0)


async def refusal(call: Any) -> RpcFailure:  # noqa: ANN401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await call.read()
    return failure_of(caught.value)


async def test_watch_is_refused_when_there_is_no_such_service(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    failure = await refusal(stub.Watch(health_pb2.HealthCheckRequest(service="no.Service")))
    assert failure.reason == "SERVICE_UNKNOWN"


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_message_to_health_is_refused_undecoded_when_it_is_long(
    channel: grpc.aio.Channel, method: str
) -> None:
    call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
    # A known service and a field that nobody knows: decoded, it would be answered.
    message = health_pb2.HealthCheckRequest(service="a.Service").SerializeToString()
    failure = await refusal(call(message + b"\x7a\x80\x08" + bytes(1024)))
    assert failure.reason == "MESSAGE_TOO_LARGE"


async def test_watch_is_refused_when_so_many_are_open_and_taken_when_one_has_ended(
    channel: grpc.aio.Channel,
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="a.Service")
    calls = [stub.Watch(request) for _ in range(MAX_WATCHES)]
    assert {(await call.read()).status for call in calls} == {SERVING}

    failure = await refusal(stub.Watch(request))
    assert (failure.reason, failure.retry_delay_s) == ("QUEUE_FULL", 1.0)
    assert str(MAX_WATCHES) in failure.message
    assert (await stub.Check(request)).status == SERVING

    calls.pop().cancel()
    async with asyncio.timeout(PATIENCE_S):
        while (status := await first(stub.Watch(request))) is None:
            pass
    assert status == SERVING


async def first(call: Any) -> int | None:  # noqa: ANN401
    try:
        return int((await call.read()).status)
    except grpc.aio.AioRpcError:
        return None
