"""Errors of a client without a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from splitserve_client import AsyncClient, ClientConfig, ServerUnreachable
from splitserve_rpc import Access, ServerSecurity
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.security.cluster import Certificates

PLAIN = "cannot connect to {} in plain text: no server answers, or it requires TLS"
WITH_TLS = (
    "cannot connect to {} with TLS: no server answers, or it requires plain text or another "
    "certificate"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def secured(certificates: Certificates) -> AsyncIterator[str]:
    """The address of a server that asks for certificates."""
    security = ServerSecurity(Access(), certificates.identity("scheduler").tls)
    running = await start(FakeScheduler(), security=security)
    yield f"127.0.0.1:{running.port}"
    await running.server.stop(None)


async def _problem(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    async with AsyncClient(address, ClientConfig(credentials=credentials)) as client:
        with pytest.raises(ServerUnreachable) as raised:
            await client.get_model()
    return raised.value.message


async def test_client_names_plain_text_when_server_wants_tls(secured: str) -> None:
    problem = await _problem(secured, None)
    assert problem.startswith(PLAIN.format(secured))
    assert problem.endswith("Socket closed)")


async def test_client_names_tls_when_server_wants_a_certificate(
    secured: str, certificates: Certificates
) -> None:
    problem = await _problem(secured, certificates.client())
    assert problem.startswith(WITH_TLS.format(secured))


async def test_client_names_tls_when_server_wants_plain_text(
    address: str, certificates: Certificates
) -> None:
    problem = await _problem(address, certificates.client())
    assert problem.startswith(WITH_TLS.format(address))
    assert "Tls handshake failed" in problem
    assert "WRONG_VERSION_NUMBER" in problem


async def test_client_says_what_is_wrong_when_another_authority_is_believed(
    secured: str, tmp_path: Path
) -> None:
    problem = await _problem(secured, Certificates.make(tmp_path).client("operator"))
    assert "Tls handshake failed" in problem
    assert "certificate" in problem.partition("Tls handshake failed")[2]


async def test_client_says_that_nobody_listens(unused_tcp_port: int) -> None:
    problem = await _problem(f"127.0.0.1:{unused_tcp_port}", None)
    assert "Connection refused" in problem
    assert problem.isprintable()
    assert len(problem) < 500


async def test_client_says_that_it_was_closed(address: str) -> None:
    client = AsyncClient(address)
    await client.get_model()
    await client.close()
    with pytest.raises(ServerUnreachable, match="the client is closed"):
        await client.get_model()
