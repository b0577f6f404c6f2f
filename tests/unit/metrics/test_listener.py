"""Tests the listener of metrics: answers, bounds and certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from splitserve_metrics import MAX_CONNECTIONS, MetricsAddress, MetricsListener, Page
from splitserve_rpc import SecurityUnusable, TlsFiles
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import Certificates

NEAR = "127.0.0.1:0"
OPTIONS: dict[str, object] = {
    "metrics_listen": None,
    "tls_cert": None,
    "tls_key": None,
    "tls_ca": None,
    "insecure": False,
}


@asynccontextmanager
async def listening(registry: CollectorRegistry) -> AsyncIterator[int]:
    listener = MetricsListener(MetricsAddress(NEAR), lambda: Page(registry, []))
    address = await listener.start()
    try:
        yield int(address.rpartition(":")[2])
    finally:
        await listener.close()


async def say(port: int, request: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_listener_shows_what_the_page_has() -> None:
    registry = CollectorRegistry()
    Counter("things_total", "Some.", registry=registry).inc(3)
    async with listening(registry) as port:
        answer = await say(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    families = list(text_string_to_metric_families(body.decode()))
    assert [(f.name, f.samples[0].value) for f in families] == [("things", 3.0)]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"GET /metrics?x=1 HTTP/1.1", b"200"),
        (b"nonsense", b"404"),
    ],
)
async def test_listener_has_one_page(request_line: bytes, status: bytes) -> None:
    async with listening(CollectorRegistry()) as port:
        answer = await say(port, request_line + b"\r\n\r\n")

    assert answer.split(b" ", 2)[1] == status


async def test_listener_answers_nobody_who_says_too_much() -> None:
    async with listening(CollectorRegistry()) as port:
        with_too_much = b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 100_000
        try:
            answer = await say(port, with_too_much)
        except ConnectionError:
            answer = b""

    assert answer == b""


async def test_listener_takes_no_more_connections_than_it_has_places() -> None:
    async with listening(CollectorRegistry()) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        try:
            refused = await say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        except ConnectionError:
            refused = b""
        idle[0][1].write(b"GET /metrics HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answered = await idle[0][0].read()
        for _, writer in idle:
            writer.close()

    assert refused == b""
    assert answered.startswith(b"HTTP/1.1 200")


async def test_listener_answers_with_tls_only_who_has_a_certificate(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    address = MetricsAddress(NEAR, made.files("scheduler"))
    listener = MetricsListener(address, lambda: Page(CollectorRegistry(), []))
    port = int((await listener.start()).rpartition(":")[2])
    known = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    known.load_cert_chain(tmp_path / "operator.crt", tmp_path / "operator.key")
    stranger = ssl.create_default_context(cafile=tmp_path / "ca.crt")

    async def answer(context: ssl.SSLContext) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            said = await reader.read()
            writer.close()
            return said

    assert (await answer(known)).startswith(b"HTTP/1.1 200")
    try:  # the handshake of TLS 1.3 is over before the server has looked
        said = await answer(stranger)
    except (ssl.SSLError, ConnectionError):
        said = b""
    assert said == b""
    await listener.close()


FILES = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
FAR = {"metrics_listen": "0.0.0.0:9100"}


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, None),
        ({"metrics_listen": NEAR}, MetricsAddress(NEAR, None)),
        (FAR | {"insecure": True}, MetricsAddress("0.0.0.0:9100", None)),
        (
            FAR | FILES,
            MetricsAddress("0.0.0.0:9100", TlsFiles(Path("c"), Path("k"), Path("a"))),
        ),
    ],
)
def test_address_follows_from_options(
    given: dict[str, object], address: MetricsAddress | None
) -> None:
    assert MetricsAddress.from_options(OPTIONS | given) == address


def test_address_is_refused_when_others_reach_it_unprotected() -> None:
    with pytest.raises(SecurityUnusable, match=r"--metrics-listen 0\.0\.0\.0:9100: other machines"):
        MetricsAddress.from_options(OPTIONS | FAR)
