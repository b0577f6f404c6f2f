"""Servers that are not there, or speak otherwise than expected."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from splitserve_cli.checks.connection import check_connection
from splitserve_cli.checks.finding import State
from tests.support.security.cluster import Certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def server(certificates: Certificates | None) -> AsyncIterator[str]:
    """Its address; with TLS if it has certificates. It says nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    context = None
    if certificates is not None:
        files = certificates.files("scheduler")
        assert files.cert is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.cert, files.key)
    running = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with running:
        yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def test_nobody_listens_at_an_address_that_was_let_go() -> None:
    async with server(None) as address:
        pass
    (finding,) = await check_connection(address, None, wants_tls=False)
    assert (finding.state, "nobody listens" in finding.meaning) == (State.WRONG, True)


async def test_unknown_name_is_wrong() -> None:
    (finding,) = await check_connection("nowhere.invalid:1", None, wants_tls=False)
    assert finding.state is State.WRONG


async def test_name_that_cannot_be_one_is_wrong() -> None:
    (finding,) = await check_connection("a..b:1", None, wants_tls=False)
    assert finding.state is State.WRONG


async def test_certificate_is_looked_at_for_the_name_that_several_share(made: Certificates) -> None:
    ca = made.directory / "ca.crt"
    async with server(made) as address:
        for name, state in (("localhost", State.OK), ("elsewhere.invalid", State.WRONG)):
            findings = await check_connection(address, ca, wants_tls=True, tls_name=name)
            assert findings[-1].state is state


async def test_plain_text_is_well_unless_tls_is_expected() -> None:
    async with server(None) as address:
        findings = await check_connection(address, None, wants_tls=False)
        assert [each.state for each in findings] == [State.OK]
        findings = await check_connection(address, None, wants_tls=True)
        assert [each.state for each in findings] == [State.OK, State.WRONG]
        assert findings[1].found == "it speaks plain text"


async def test_tls_is_well_if_it_is_expected_and_believed(
    made: Certificates, tmp_path: Path
) -> None:
    ca = made.directory / "ca.crt"
    other = Certificates.make(tmp_path).directory / "ca.crt"
    async with server(made) as address:
        findings = await check_connection(address, ca, wants_tls=True)
        assert [each.state for each in findings] == [State.OK]
        findings = await check_connection(address, ca, wants_tls=False)
        assert findings[1].found == "it speaks TLS"
        findings = await check_connection(address, other, wants_tls=True)
        assert findings[1].meaning == "it is not believed"
        name = address.replace("127.0.0.1", "127.0.0.2")
        assert (await check_connection(name, ca, wants_tls=True))[0].state is State.WRONG
