"""Requests as few programs send them, by the byte: the right status, and nothing is left of them.

Clients that leave: test_gateway_disconnects; that do not read, send too much, or are many:
test_gateway_harm; that send too large heads, or bodies that nobody waits for:
test_gateway_connections.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from splitserve_gateway.http import bodies, connection
from tests.support.processes.gateway import (
    RunningGateway,
    post_bytes,
    running_gateway,
    text_executor,
)
from tests.support.processes.http_clients import Leftovers, wait_for_nothing

PATH = "/v1/completions"
COMPLETION = {"prompt": "one two", "max_tokens": 3, "seed": 1}
BODY = json.dumps(COMPLETION).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
H2C = "connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQ"
WEBSOCKET = "connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("tokenizer"))
    async with running_gateway(executor) as running:
        await running.post(PATH, **COMPLETION)
        await running.http.aclose()
        await running.service.wait_idle()
        before = Leftovers.now()
        yield running
        await wait_for_nothing(running.server, running.service, before)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def request(
    *headers: str,
    method: str = "POST",
    target: str = PATH,
    version: str = "1.1",
    body: bytes = BODY,
) -> bytes:
    """With a length only if `headers` say it."""
    lines = [f"{method} {target} HTTP/{version}", "host: x", *headers]
    if method == "POST":
        lines.append("content-type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(body: bytes, *headers: str) -> bytes:
    return request("transfer-encoding: chunked", *headers, body=body)


LENGTH = f"content-length: {len(BODY)}"
TAKEN = {
    "expectation that is none": request(LENGTH, "expect: patience"),
    "h2c": request(LENGTH, *H2C),
    "h2c and chunks": chunked(CHUNKED + b"\r\n", *H2C),
    "h2c and nothing else": request(*H2C, method="GET", target="/v1/models", body=b""),
    "websocket": request(*WEBSOCKET, method="GET", target="/v1/models", body=b""),
    "chunks": chunked(CHUNKED + b"\r\n"),
    "chunks with extensions": chunked(CHUNKED.replace(b"\r\n", b";a=b\r\n", 1) + b"\r\n"),
    "chunks with trailers": chunked(CHUNKED + b"x-a: 1\r\nx-b: 2\r\n\r\n", "trailer: x-a"),
    "chunks of a byte": chunked(b"".join(b"1\r\n%c\r\n" % b for b in BODY) + b"0\r\n\r\n"),
}


async def statuses(gateway: RunningGateway, *data: bytes) -> list[int]:
    """Of all answers to `data`; sends no more, and reads to the end of the connection."""
    reader, writer = await gateway.connect()
    for part in data:
        writer.write(part)
        await asyncio.sleep(0)
    found = await reader.read()
    writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


LAST = LIVE.replace(b"host", b"connection: close\r\nhost")


@pytest.mark.parametrize("name", TAKEN)
async def test_request_is_answered_and_the_connection_goes_on(
    gateway: RunningGateway, name: str
) -> None:
    assert await statuses(gateway, TAKEN[name] + LIVE + LAST) == [200, 200, 200]


async def test_request_is_answered_when_it_comes_byte_by_byte(gateway: RunningGateway) -> None:
    for name in ("h2c and chunks", "chunks with trailers"):
        data = TAKEN[name] + LAST
        assert await statuses(gateway, *(bytes([byte]) for byte in data)) == [200, 200]


async def test_old_client_gets_a_stream_that_ends_with_the_connection(
    gateway: RunningGateway,
) -> None:
    """RFC 9112, 6.1: it knows no chunks; whether it would keep the connection does not matter."""
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    length = f"content-length: {len(body)}"
    reader, writer = await gateway.connect()
    writer.write(request(length, "connection: keep-alive", version="1.0", body=body))
    head, _, events = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"\r\ntransfer-encoding:" not in head
    assert b"\r\nconnection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"\n\ndata: [DONE]\n\n")


async def test_client_that_asks_whether_to_send_is_told_so(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    writer.write(request(LENGTH, "expect: 100-continue", body=b""))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_expectation_is_refused_when_the_body_is_too_large(
    gateway: RunningGateway,
) -> None:
    data = request("content-length: 99999999999", "expect: 100-continue", body=b"")
    assert await statuses(gateway, data) == [413]


async def test_head_that_does_not_end_is_refused(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    # Also of the second request.
    for before in (b"", LIVE):
        data = before + b"POST / HTTP/1.1\r\nhost: x\r\nx: "
        assert (await statuses(gateway, data))[-1] == 408


async def test_body_that_does_not_end_is_refused(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)
    for data in (request(LENGTH, body=BODY[:-1]), chunked(CHUNKED[:-3])):
        assert await statuses(gateway, data) == [408]


async def test_others_are_answered_as_ever_while_clients_are_rude(gateway: RunningGateway) -> None:
    rng = random.Random(1)
    rude = [*TAKEN.values(), request(LENGTH, LENGTH), chunked(b"zz\r\n"), request(method="BREW")]

    async def be_rude() -> None:
        """Sends half of something, and leaves with a reset."""
        _, writer = await gateway.connect()
        data = rng.choice(rude)
        writer.write(data[: rng.randrange(len(data))])
        await asyncio.sleep(0)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def answer() -> bytes:
        reader, writer = await gateway.connect()
        headers = "connection: close\r\n"
        writer.write(post_bytes(PATH, {**COMPLETION, "max_tokens": 60}, headers))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        writer.close()
        text: bytes = json.loads(body)["choices"][0]["text"]
        return text

    alone = await answer()
    answers = [answer() for _ in range(8)]
    found = await asyncio.gather(*answers, *(be_rude() for _ in range(150)))
    assert found[:8] == [alone] * 8
