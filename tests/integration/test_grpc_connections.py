"""Peers that only hold connections, by the byte: none costs more than its limit."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve_rpc.server import ConnectionLimits, bind_server
from tests.support.processes.patience import PATIENCE_S

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


async def test_server_says_how_many_calls_it_takes_side_by_side() -> None:
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
