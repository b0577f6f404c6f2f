"""Limits and ends of HTTP connections, by raw sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest
import pytest_asyncio

from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.http import FREE_BYTES, BodyBudget, connection, connection_places
from splitserve_gateway.sharing import Shares
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor
from tests.support.security.cluster import Certificates

COMPLETION = {"prompt": "one two", "max_tokens": 3}
HEAD_BYTES = 64 * 1024
TARGET_BYTES = 16 * 1024
JSON = "content-type: application/json\r\n"
POST = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["http", "https"])
async def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("tokenizer"))
    config = GatewayConfig(max_body_bytes=2**20)
    if request.param == "https":
        certificates = Certificates.make(tmp_path_factory.mktemp("certificates"))
        config = replace(config, http_tls=certificates.files("gateway", ca=False))
    async with running_gateway(executor, config=config) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("num_bytes_each", [10**6, 1000])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health/live HTTP/1.1\r\nx: " + b"y" * HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET /health/live HTTP/1.1\r\n" + b"x: y\r\n" * 12_000 + b"\r\n", 431),
        (b"GET /" + b"y" * HEAD_BYTES + b" HTTP/1.1\r\nx: y\r\n\r\n", 414),
        (b"GET /health/live HTTP/1.1\r\nx: " + b"y" * HEAD_BYTES, 431),
    ],
    ids=["one header", "many headers", "path", "no end"],
)
async def test_head_is_refused_when_too_large(
    gateway: RunningGateway, head: bytes, status: int, num_bytes_each: int
) -> None:
    reader, writer = await gateway.connect()
    # What comes first is small, so the rest may come with it or after it.
    live = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(live)
    assert (await answer(reader))[0] == 200
    for start in range(0, len(head), num_bytes_each):
        writer.write(head[start : start + num_bytes_each])
        await asyncio.sleep(0)
    found, headers, body = await answer(reader)

    assert (found, headers["connection"]) == (status, "close")
    most = TARGET_BYTES if status == 414 else HEAD_BYTES
    assert f"{most} bytes" in json.loads(body)["error"]["message"]
    assert await reader.read() == b""
    writer.close()


async def test_head_is_taken_when_of_the_largest_size(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    head = b"GET /health/live HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (HEAD_BYTES - 100) + b"\r\n\r\n"
    writer.write(head * 2)
    assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]
    writer.close()


async def test_connection_ends_when_what_follows_a_body_is_too_large(
    gateway: RunningGateway,
) -> None:
    reader, writer = await gateway.connect()
    content = json.dumps({**COMPLETION, "max_tokens": 900}).encode()
    writer.write(chunked_head() + b"%x\r\n%s\r\n0\r\n" % (len(content), content))
    writer.write(b"x: " + b"y" * (16 * HEAD_BYTES))
    assert (await answer(reader))[0] == 431
    assert await reader.read() == b""
    writer.close()


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("path", "head", "status"),
    [
        ("/v1/completions", f"{JSON}content-length: 3000000", 413),
        ("/v1/completions", f"{JSON}content-length: {'0' * 5000}3000000", 413),
        ("/v1/completions", f"{JSON}transfer-encoding: chunked", 413),
        ("/v1/completions", "content-length: 3000000", 415),
        ("/v1/completions", "content-type: text/plain\r\ncontent-length: 3000000", 415),
        ("/v1/nothing", "content-length: 3000000", 404),
        ("/v1/models", "content-length: 3000000", 405),
    ],
)
async def test_connection_ends_when_the_answer_ignores_the_body(
    gateway: RunningGateway, path: str, head: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over TLS it is only then that a client which never looks learns of the end.
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    reader, writer = await gateway.connect()
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
    sending = asyncio.create_task(send_on(writer))
    found, headers, _ = await answer(reader)

    assert (found, headers["connection"]) == (status, "close")
    assert await reader.read() == b""
    sending.cancel()
    await asyncio.wait({sending})
    writer.close()


async def test_nothing_is_answered_after_an_early_refusal(
    gateway: RunningGateway,
) -> None:
    reader, writer = await gateway.connect()
    writer.write(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
    assert (await answer(reader))[0] == 404
    # The rest of the body, and what would be a request.
    writer.write(b"0123456789GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await reader.read() == b""
    writer.close()


async def test_connection_goes_on_when_a_refused_body_has_come(
    gateway: RunningGateway,
) -> None:
    reader, writer = await gateway.connect()
    wrong = b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    writer.write(wrong + b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    (first, headers, _), (second, _, _) = await answer(reader), await answer(reader)
    assert (first, second) == (404, 200)
    assert "connection" not in headers
    writer.close()


async def test_client_counts_as_gone_when_it_shuts_down_its_side(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    content = json.dumps({**COMPLETION, "max_tokens": 900}).encode()
    head = f"{POST}content-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await gateway.until(lambda: gateway.server.exchanges.num_open == 1)
    if writer.can_write_eof():
        writer.write_eof()
        assert await reader.read() == b""
    else:
        # TLS knows no connection that is closed on one side.
        writer.close()
    await gateway.until(lambda: gateway.server.exchanges.num_open == 0)
    writer.close()


async def test_small_bodies_pass_when_large_ones_fill_the_budget(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = gateway.server.app.state.gateway
    # Just what two of them take.
    budget = BodyBudget(2 * (2**20 - 1 - FREE_BYTES), patience_s=0.01)
    monkeypatch.setattr(gateway.server.app.state, "gateway", replace(parts, bodies=budget))
    content = b" " * (2**20 - 1)
    head = f"{POST}content-length: {2**20}\r\n\r\n".encode()
    large = [await gateway.connect() for _ in range(3)]
    for number, (_, writer) in enumerate(large[:2], 1):
        writer.write(head + content)
        held = number * (len(content) - FREE_BYTES)
        await gateway.until(lambda held=held: budget.num_bytes == held)  # type: ignore[misc]
    large[2][1].write(head + content)
    status, headers, body = await answer(large[2][0])
    assert (status, headers["connection"]) == (429, "close")
    assert int(headers["retry-after"]) >= 1
    assert json.loads(body)["error"]["code"] == "too_many_body_bytes"

    await gateway.post("/v1/completions", **COMPLETION)
    for _, writer in large:
        writer.close()
    await gateway.until(lambda: gateway.server.exchanges.num_open == 0)
    assert budget.num_bytes == 0


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of the next answer."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), headers, body


def chunked_head() -> bytes:
    return f"{POST}transfer-encoding: chunked\r\n\r\n".encode()


async def send_on(writer: asyncio.StreamWriter) -> None:
    """Chunks of a body that never ends."""
    while True:
        writer.write(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
        await writer.drain()


async def test_connection_is_cut_when_there_are_too_many(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.http.aclose()
    open_ones = gateway.server.server_state.connections
    await gateway.until(lambda: not open_ones)
    monkeypatch.setattr(gateway.server, "places", Shares(1))
    live = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    reader, writer = await gateway.connect()
    writer.write(live)
    assert (await answer(reader))[0] == 200

    # Over TLS it comes to no handshake.
    with suppress(ConnectionError):
        further, leaving = await gateway.connect()
        assert await further.read() == b""
        leaving.close()

    writer.write(live)
    assert (await answer(reader))[0] == 200
    writer.close()
    await gateway.until(lambda: not open_ones)
    reader, writer = await gateway.connect()
    writer.write(live)
    assert (await answer(reader))[0] == 200
    writer.close()


async def test_connections_of_one_address_leave_places_to_others(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.http.aclose()
    open_ones = gateway.server.server_state.connections
    await gateway.until(lambda: not open_ones)
    places = connection_places(8)
    monkeypatch.setattr(gateway.server, "places", places)
    config = gateway.server.config
    # They say nothing, so over TLS their handshakes never end.
    silent = [await asyncio.open_connection(config.host, config.port) for _ in range(12)]
    await gateway.until(lambda: places.num_held == 8)
    await gateway.until(lambda: sum(reader.at_eof() for reader, _ in silent) >= 4)

    reader, writer = await asyncio.open_connection(
        config.host, config.port, ssl=gateway.client_tls, local_addr=("127.0.0.2", 0)
    )
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await answer(reader))[0] == 200
    for _, each in (*silent, (reader, writer)):
        each.close()
    await gateway.until(lambda: places.num_held == 0)
