"""What a client says that got no connection."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from splitserve_client import AsyncClient, ClientConfig, ServerUnreachable
from splitserve_rpc.access import Access
from splitserve_rpc.server import ServerSecurity
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.security.cluster import Certificates

PLAIN = "cannot connect to {} in plain text: no server answers, or it wants TLS"
WITH_TLS = (
    "cannot connect to {} with TLS: no server answers, or it wants plain text, or another "
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


async def test_client_says_how_it_tried_when_the_server_wants_tls(secured: str) -> None:
    assert await _problem(secured, None) == PLAIN.format(secured)


async def test_client_says_how_it_tried_when_the_server_wants_a_certificate(
    secured: str, certificates: Certificates
) -> None:
    assert await _problem(secured, certificates.client()) == WITH_TLS.format(secured)


async def test_client_says_how_it_tried_when_the_server_wants_plain_text(
    address: str, certificates: Certificates
) -> None:
    assert await _problem(address, certificates.client()) == WITH_TLS.format(address)
