"""Tests servers of gRPC: limits of connections, health, ciphers."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from splitserve_gateway.config import GatewayConfig
from splitserve_metrics import MetricsAddress, MetricsListener, Page
from splitserve_rpc import (
    MAX_WATCHES,
    Access,
    ConnectionLimits,
    RpcFailure,
    RunningServer,
    ServerSecurity,
    Tls,
    bind_server,
    failure_of,
    healthcheck,
)
from tests.support.processes.gateway import serving
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import Certificates

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
MAX_CONCURRENT_STREAMS = 3
ENHANCE_YOUR_CALM = 11
# What our pings say, and with them their answers.
OURS = b"is alive"


class Connection:
    """HTTP/2 (RFC 9113) as far as it needs no header compression."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, kind: int, payload: bytes = b"") -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4)
        self._writer.write(head + payload)

    def greet(self) -> None:
        self._writer.write(PREFACE)
        self.send(SETTINGS)

    async def frame(self) -> tuple[int, bytes] | None:
        """The kind and payload of the next; None: the server has ended the connection."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self._reader.readexactly(9)
                return head[3], await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def first(self, kind: int) -> bytes:
        """The payload of the first of a kind."""
        while (frame := await self.frame()) is not None:
            if frame[0] == kind:
                return frame[1]
        raise ConnectionError("it ended before")


@asynccontextmanager
async def connection_to(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def server(limits: ConnectionLimits) -> AsyncIterator[int]:
    """The port of one with these limits."""
    running = bind_server("127.0.0.1:0", (), limits=limits)
    await running.server.start()
    try:
        yield running.port
    finally:
        await running.stop(0)


async def test_connection_is_closed_at_once_when_there_are_too_many() -> None:
    async with server(ConnectionLimits(max_connections=2)) as port, connection_to(port) as kept:
        kept.greet()
        await kept.first(SETTINGS)
        async with connection_to(port) as left, connection_to(port) as further:
            left.greet()
            await left.first(SETTINGS)
            further.greet()
            assert await further.frame() is None
        # When there is room again, there is room.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)


async def test_server_says_how_many_calls_it_takes() -> None:
    async with server(ConnectionLimits(max_streams=7)) as port, connection_to(port) as connection:
        connection.greet()
        payload = await connection.first(SETTINGS)

    settings = dict(struct.iter_unpack(">HI", payload))
    assert settings[MAX_CONCURRENT_STREAMS] == 7


@pytest.mark.parametrize("sent", [b"", PREFACE[:10]])
async def test_connection_ends_when_nothing_comes_of_it(sent: bytes) -> None:
    async with server(ConnectionLimits(handshake_s=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            # It may say first what it would have agreed to.
            await reader.read()
        writer.close()


async def test_connection_ends_when_no_call_is_made_on_it() -> None:
    async with server(ConnectionLimits(idle_s=0.2)) as port, connection_to(port) as connection:
        connection.greet()
        assert (await connection.first(GOAWAY)).endswith(b"connection idle")


async def test_client_calls_again_when_its_idle_connection_was_ended() -> None:
    async with (
        server(ConnectionLimits(idle_s=0.3)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            await stub.Check(health_pb2.HealthCheckRequest())
            async with asyncio.timeout(PATIENCE_S):
                while channel.get_state() is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_connection_ends_when_it_pings_without_pause() -> None:
    async with server(ConnectionLimits()) as port, connection_to(port) as connection:
        connection.greet()
        kind, payload = PING, OURS
        while kind != GOAWAY:
            # One after the other: a server that ends a connection, of which it has not read all,
            # cuts off what it said at last.
            if (kind, payload) == (PING, OURS):
                connection.send(PING, OURS)
            frame = await connection.frame()
            assert frame is not None, "it says why it ends"
            kind, payload = frame

    assert int.from_bytes(payload[4:8], "big") == ENHANCE_YOUR_CALM


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(8 * 1024, True), (40 * 1024, False)])
async def test_call_is_refused_when_its_headers_are_too_large(
    num_bytes: int, is_taken: bool
) -> None:
    async with (
        server(ConnectionLimits()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        metadata = [("authorization", "x" * num_bytes)]
        call = stub.Check(request, metadata=metadata)
        code = await call.code()
        assert (code is grpc.StatusCode.OK) == is_taken
        # Others are not disturbed, not even on the same connection.
        await stub.Check(request)


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
async def test_long_message_to_health_is_refused_undecoded(
    channel: grpc.aio.Channel, method: str
) -> None:
    call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
    # A known service and a field that nobody knows: decoded, it would be answered.
    message = health_pb2.HealthCheckRequest(service="a.Service").SerializeToString()
    failure = await refusal(call(message + b"\x7a\x80\x08" + bytes(1024)))
    assert failure.reason == "MESSAGE_TOO_LARGE"


async def test_watch_is_refused_while_too_many_are_open(
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


# Our certificates are of elliptic curves; the others are for those of RSA.
SAFE = {"ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"}
MORE = {"ECDHE-ECDSA-CHACHA20-POLY1305"}


def ciphers_taken(port: int, ca: Path) -> set[str]:
    """Of all that OpenSSL knows, those with which a handshake succeeds."""
    every = ssl.create_default_context()
    every.set_ciphers("ALL:!PSK:!SRP:!aNULL:@SECLEVEL=0")
    names = {each["name"] for each in every.get_ciphers() if each["protocol"] != "TLSv1.3"}
    assert "ECDHE-ECDSA-AES128-SHA" in names, "OpenSSL knows no cipher of CBC: nothing is tested"
    return {name for name in names if is_taken(port, ca, name)}


def is_taken(port: int, ca: Path, cipher: str) -> bool:
    context = ssl.create_default_context(cafile=ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(f"{cipher}:@SECLEVEL=0")
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port)) as connection,
            context.wrap_socket(connection, server_hostname="localhost"),
        ):
            return True
    except (ssl.SSLError, ConnectionError):
        return False


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path)


async def test_gateway_takes_no_cipher_of_cbc(certificates: Certificates) -> None:
    async with serving(GatewayConfig(http_tls=certificates.files("gateway", ca=False))) as server:
        ca = certificates.directory / "ca.crt"
        assert await asyncio.to_thread(ciphers_taken, server.config.port, ca) == SAFE | MORE


async def test_metrics_take_no_cipher_of_tls_1_2(certificates: Certificates) -> None:
    address = MetricsAddress("127.0.0.1:0", certificates.files("scheduler"))
    listener = MetricsListener(address, lambda: Page(CollectorRegistry(), []))
    port = int((await listener.start()).rpartition(":")[2])
    ca = certificates.directory / "ca.crt"
    assert await asyncio.to_thread(ciphers_taken, port, ca) == set()
    await listener.close()


async def test_grpc_takes_no_cipher_of_cbc(certificates: Certificates) -> None:
    tls = Tls(certificates.files("scheduler", ca=False))
    running = bind_server("127.0.0.1:0", (), security=ServerSecurity(Access(), tls))
    await running.server.start()
    ca = certificates.directory / "ca.crt"
    taken = await asyncio.to_thread(ciphers_taken, running.port, ca)
    assert SAFE <= taken <= SAFE | MORE
    await running.stop(0)
