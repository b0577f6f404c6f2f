"""Checks of connections and TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from splitserve_cli.checks.connection import TlsWords, check_connection
from splitserve_cli.checks.finding import State
from splitserve_rpc import TlsFiles
from tests.support.security.cluster import Certificates


@asynccontextmanager
async def server(
    certificates: Certificates | None, *, asks_clients: bool = False
) -> AsyncIterator[str]:
    """Its address; with TLS if it has certificates. It says nothing.

    `asks_clients`: for a certificate of the same authority.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    context = None
    if certificates is not None:
        files = certificates.files("scheduler")
        assert files.cert is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.cert, files.key)
        if asks_clients:
            context.load_verify_locations(certificates.directory / "ca.crt")
            context.verify_mode = ssl.CERT_REQUIRED
    running = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with running:
        yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def test_address_is_wrong_when_nobody_is_there() -> None:
    async with server(None) as gone:
        pass
    for address, meaning in (
        (gone, "no process listens"),
        ("nowhere.invalid:1", ""),
        ("a..b:1", ""),
    ):
        (finding,) = await check_connection(address, TlsFiles(), uses_tls=False)
        assert finding.state is State.WRONG
        assert meaning in finding.meaning


async def test_plain_text_is_well_unless_tls_is_expected() -> None:
    async with server(None) as address:
        findings = await check_connection(address, TlsFiles(), uses_tls=False)
        assert [each.state for each in findings] == [State.OK]
        findings = await check_connection(address, TlsFiles(), uses_tls=True)
        assert [each.state for each in findings] == [State.OK, State.WRONG]
        assert findings[1].found == "the server uses plain text"


async def test_tls_is_well_if_it_is_expected_and_believed(
    made: Certificates, tmp_path: Path
) -> None:
    ca = made.directory / "ca.crt"
    other = Certificates.make(tmp_path).directory / "ca.crt"
    async with server(made) as address:
        findings = await check_connection(address, TlsFiles(ca=ca), uses_tls=True)
        assert [each.state for each in findings] == [State.OK]
        findings = await check_connection(address, TlsFiles(ca=ca), uses_tls=False)
        assert findings[1].found == "the server uses TLS"
        findings = await check_connection(address, TlsFiles(ca=other), uses_tls=True)
        assert findings[1].meaning == "its certificate is not trusted"
        name = address.replace("127.0.0.1", "127.0.0.2")
        assert (await check_connection(name, TlsFiles(ca=ca), uses_tls=True))[
            0
        ].state is State.WRONG


async def test_certificate_problem_tells_host_from_authority(
    made: Certificates, tmp_path: Path
) -> None:
    ca = TlsFiles(ca=made.directory / "ca.crt")
    other = TlsFiles(ca=Certificates.make(tmp_path).directory / "ca.crt")
    async with server(made) as address:
        shared = await check_connection(address, ca, uses_tls=True, tls_name="localhost")
        assert shared[-1].state is State.OK
        named = await check_connection(address, ca, uses_tls=True, tls_name="elsewhere.invalid")
        assert "use a host name of its certificate" in named[1].remedy
        signed = await check_connection(address, other, uses_tls=True)
        assert "the authority that signed" in signed[1].remedy


async def test_server_that_wants_a_certificate_of_ours_is_named(
    made: Certificates, tmp_path: Path
) -> None:
    ca, stranger = made.directory / "ca.crt", Certificates.make(tmp_path).files("operator")
    ours = made.files("operator")
    async with server(made, asks_clients=True) as address:
        none = await check_connection(address, TlsFiles(ca=ca), uses_tls=True)
        assert "requires a client certificate" in none[1].meaning
        strange = TlsFiles(stranger.cert, stranger.key, ca)
        other = await check_connection(address, strange, uses_tls=True)
        assert "rejects the client certificate" in other[1].meaning
        well = await check_connection(address, TlsFiles(ours.cert, ours.key, ca), uses_tls=True)
        assert [each.state for each in well] == [State.OK]


async def test_remedies_are_in_the_words_of_whom_is_asked() -> None:
    words = TlsWords("start it so", "ask it so", "ask it otherwise")
    async with server(None) as address:
        findings = await check_connection(address, TlsFiles(), uses_tls=True, words=words)
    assert findings[1].remedy == "start it so; or ask it otherwise"
