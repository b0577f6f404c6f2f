"""Health may be asked by anybody: what strangers say is not kept, and their streams are few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve_rpc import healthcheck
from splitserve_rpc.errors import RpcFailure, failure_of
from splitserve_rpc.health_service import MAX_WATCHES
from splitserve_rpc.server import RunningServer, bind_server
from tests.support.processes.patience import PATIENCE_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def running() -> AsyncIterator[RunningServer]:
    running = bind_server("127.0.0.1:0", ())
    await running.server.start()
    await running.set_serving(["a.Service"], serving=True)
    yield running
    await running.stop(0)


@pytest.fixture
async def channel(running: RunningServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield channel


@pytest.mark.parametrize("is_serving", [True, False])
async def test_alive_is_serving_and_ready_is_as_the_server_is(
    running: RunningServer, channel: grpc.aio.Channel, is_serving: bool
) -> None:
    await running.set_serving(["", "a.Service"], is_serving)
    stub = health_pb2_grpc.HealthStub(channel)
    state = SERVING if is_serving else NOT_SERVING
    for service, expected in [("alive", SERVING), ("ready", state), ("", state)]:
        request = health_pb2.HealthCheckRequest(service=service)
        assert (await stub.Check(request)).status == expected, service
        assert await first(stub.Watch(request)) == expected, service


async def test_watch_of_ready_is_told_when_the_server_is_no_longer(
    running: RunningServer, channel: grpc.aio.Channel
) -> None:
    await running.set_serving([""], True)
    stub = health_pb2_grpc.HealthStub(channel)
    ready = stub.Watch(health_pb2.HealthCheckRequest(service="ready"))
    alive = stub.Watch(health_pb2.HealthCheckRequest(service="alive"))
    async with asyncio.timeout(PATIENCE_S):
        assert [(await call.read()).status for call in (ready, alive)] == [SERVING, SERVING]
        await running.set_serving([""], False)
        assert (await ready.read()).status == NOT_SERVING
    assert (await stub.Check(health_pb2.HealthCheckRequest(service="alive"))).status == SERVING


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ([], [0, 1]),
        (["--alive"], [0, 0]),
        (["--service", "ready"], [0, 1]),
        (["--service=x"], [1, 1]),
    ],
)
async def test_healthcheck_asks_whether_a_server_is_ready_or_alive(
    running: RunningServer, options: list[str], codes: list[int]
) -> None:
    found = []
    for is_serving in (True, False):
        await running.set_serving([""], is_serving)
        command = [f"127.0.0.1:{running.port}", *options]
        found.append(await asyncio.to_thread(healthcheck.main, command))
    assert found == codes
    await running.stop(0)
    assert await asyncio.to_thread(healthcheck.main, [f"127.0.0.1:{running.port}", "--alive"]) == 1


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
