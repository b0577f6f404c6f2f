"""HTTPS: protocols, client certificates, and certificates that change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from splitserve_common import FilesUnusable
from splitserve_gateway import healthcheck
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_rpc import tls
from tests.contract.stranger.process import poll
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gateway import serving, trusting, url_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import gateway_process, start_gateway
from tests.support.security.cluster import Certificates

LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path / "ours")


@pytest.fixture
async def server(certificates: Certificates) -> AsyncIterator[Server]:
    config = GatewayConfig(http_tls=certificates.files("gateway", ca=False))
    async with serving(config) as running:
        yield running


async def status(server: Server, context: ssl.SSLContext) -> int:
    async with httpx2.AsyncClient(verify=context, trust_env=False) as client:
        return (await client.get(f"{url_of(server)}/health/live")).status_code


async def serial_number(server: Server, context: ssl.SSLContext) -> str:
    """Of the certificate that a new connection is shown."""
    host, port = server.config.host, server.config.port
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    number: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return number


async def test_new_connections_get_the_new_certificate(
    server: Server, certificates: Certificates
) -> None:
    context = trusting(certificates.files("gateway"))
    host, port = server.config.host, server.config.port
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    before = await serial_number(server, context)
    assert await serial_number(server, context) == before

    Certificates.make(certificates.directory)
    assert await serial_number(server, context) != before
    writer.write(LIVE)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_plain_text_is_not_answered_and_disturbs_nobody(
    server: Server, certificates: Certificates
) -> None:
    reader, writer = await asyncio.open_connection(server.config.host, server.config.port)
    writer.write(LIVE)
    assert b"HTTP" not in await reader.read()
    writer.close()
    assert await status(server, trusting(certificates.files("gateway"))) == 200


async def test_client_is_cut_when_its_handshake_takes_too_long(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 0.2)
    config = GatewayConfig(http_tls=certificates.files("gateway", ca=False))
    async with serving(config) as server:
        reader, writer = await asyncio.open_connection(server.config.host, server.config.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        with pytest.raises(asyncio.IncompleteReadError):
            async with asyncio.timeout(PATIENCE_S):
                await reader.readexactly(1)
        writer.close()
        # Who is only slow is served.
        monkeypatch.undo()
        assert await status(server, trusting(certificates.files("gateway"))) == 200


@pytest.mark.parametrize(
    ("version", "is_taken"), [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)]
)
@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated:DeprecationWarning")
async def test_older_versions_of_tls_are_refused(
    server: Server, certificates: Certificates, version: ssl.TLSVersion, is_taken: bool
) -> None:
    context = trusting(certificates.files("gateway"))
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    try:
        assert await status(server, context) == 200
        was_taken = True
    except httpx2.ConnectError:
        was_taken = False
    assert was_taken is is_taken


async def test_clients_need_a_certificate_when_an_authority_is_given(
    certificates: Certificates, tmp_path: Path
) -> None:
    clients = Certificates.make(tmp_path / "clients", "--client", "alice")
    files = certificates.files("gateway")
    ca = tmp_path / "clients.crt"
    ca.write_bytes((clients.directory / "ca.crt").read_bytes())
    stranger, alice, operator = trusting(files), trusting(files), trusting(files)
    alice.load_cert_chain(clients.directory / "alice.crt", clients.directory / "alice.key")
    ours = certificates.files("operator")
    assert ours.cert is not None
    operator.load_cert_chain(ours.cert, ours.key)
    async with serving(GatewayConfig(http_tls=replace(files, ca=ca))) as server:
        assert await status(server, alice) == 200
        for context in (stranger, operator):
            with pytest.raises(httpx2.HTTPError):
                await status(server, context)
        # It is asked for each time, or who was let in once would be when its authority is not.
        assert not await asyncio.to_thread(is_resumed, server, alice)

        ca.write_bytes((certificates.directory / "ca.crt").read_bytes())
        assert await status(server, operator) == 200
        with pytest.raises(httpx2.HTTPError):
            await status(server, alice)
        # It lives, as far as a probe without a certificate can tell.
        probe = [*probe_of(server, certificates), f"--http-tls-client-ca={ca}"]
        assert await asyncio.to_thread(healthcheck.main, probe, {}) == 0
    assert await asyncio.to_thread(healthcheck.main, probe, {}) == 1


def is_resumed(server: Server, context: ssl.SSLContext) -> bool:
    """Whether TLS knows a client again that brings along its session."""
    session: ssl.SSLSession | None = None
    was_resumed = False
    address = (server.config.host, server.config.port)
    for _ in range(2):
        with (
            socket.create_connection(address) as plain,
            context.wrap_socket(plain, server_hostname=address[0], session=session) as connection,
        ):
            connection.sendall(LIVE)
            assert connection.recv(12) == b"HTTP/1.1 200"
            session, was_resumed = connection.session, bool(connection.session_reused)
    return was_resumed


async def test_clients_without_certificates_are_known_again(
    server: Server, certificates: Certificates
) -> None:
    context = trusting(certificates.files("gateway"))
    assert await asyncio.to_thread(is_resumed, server, context)


async def test_probe_asks_over_tls(server: Server, certificates: Certificates) -> None:
    probe = probe_of(server, certificates)
    assert await asyncio.to_thread(healthcheck.main, probe, {}) == 0
    assert await asyncio.to_thread(healthcheck.main, probe[:1], {}) == 1


def probe_of(server: Server, certificates: Certificates) -> list[str]:
    """The flags of a gateway there."""
    return [f"--http={server.config.host}:{server.config.port}", *http_flags(certificates)]


def http_flags(certificates: Certificates) -> list[str]:
    files = certificates.files("gateway")
    return [f"--http-tls-cert={files.cert}", f"--http-tls-key={files.key}"]


@pytest.mark.parametrize("wrong", ["gateway.crt", "gateway.key", "ca.crt"])
def test_server_does_not_start_when_its_files_are_unusable(
    certificates: Certificates, wrong: str
) -> None:
    (certificates.directory / wrong).write_text("nothing of the kind")
    with pytest.raises(FilesUnusable, match=wrong):
        Server(GatewayConfig(http_tls=certificates.files("gateway")), "127.0.0.1:0")


async def test_process_serves_https_and_ends_early_refusals(
    certificates: Certificates,
) -> None:
    context = trusting(certificates.files("gateway"))
    unreachable = reserve_address()
    async with gateway_process(unreachable, flags=http_flags(certificates), tls=context) as gateway:
        await gateway.wait_ready(503)
        reader, writer = await asyncio.open_connection(
            gateway.http.base_url.host, gateway.http.base_url.port, ssl=context
        )
        writer.write(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("is_https", [True, False])
async def test_process_logs_nothing_of_who_speaks_another_protocol(
    certificates: Certificates, is_https: bool
) -> None:
    address = reserve_address()
    flags = http_flags(certificates) if is_https else []
    process = start_gateway([reserve_address()], address, *flags)
    try:
        await wait_until_it_listens(address)
        for content in (TLS_HELLO, LIVE, b"\x00" * 1000, b""):
            assert not (await answer_of(address, content)).startswith(b"HTTP/1.1 5")
        host, port = address.split(":")
        # Its certificate is not believed, or there is none.
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection(host, int(port), ssl=ssl.create_default_context())
    finally:
        process.terminate()
        _, log = await asyncio.to_thread(process.communicate)
    lines = (log or b"").decode().splitlines()
    assert any("gateway_serving" in line for line in lines)
    assert [line for line in lines if " splitserve_gateway" not in line] == []


# Complete, and there is more to come.
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505)


async def wait_until_it_listens(address: str) -> None:
    async def ask() -> tuple[bool, object]:
        try:
            return True, await answer_of(address, b"")
        except OSError as error:
            return False, error

    await poll(ask, PATIENCE_S)


async def answer_of(address: str, content: bytes) -> bytes:
    """All that comes back, until the connection ends, as it does within a bounded time."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(content)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    return answer
