from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from splitserve_rpc.access import Access, ClusterIdentity, Role
from splitserve_rpc.server import ServerSecurity, channel_options
from tests.support.security.cluster import Certificates
from tests.support.security.everything import METHODS, all_services, outcome, serve_everything

TOKEN = "a secret of all of them"
CALLERS = ("scheduler", "executor", "operator", "alice")
# Who may call the methods of our services.
ALLOWED = {
    "splitserve.scheduler.v1.SchedulerService": CALLERS,
    "splitserve.scheduler.v1.RegistryService": ("executor",),
    "splitserve.scheduler.v1.AdminService": ("operator",),
    "splitserve.scheduler.v1.LiveService": ("operator",),
    "splitserve.executor.v1.ExecutorService": ("scheduler",),
}


def _allowed(method: str) -> tuple[str, ...]:
    return ALLOWED[method.split("/")[1]]


@dataclass
class Served:
    certificates: Certificates
    port: int

    def channel_of(self, caller: str) -> grpc.aio.Channel:
        """Of who has the certificate of `caller`."""
        identity = self.certificates.identity(caller)
        return identity.channel(f"127.0.0.1:{self.port}", Role.SCHEDULER, channel_options())

    async def call(self, channel: grpc.aio.Channel, method: str) -> str:
        """What was answered, or why not."""
        async with channel:
            return await outcome(channel, method)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"), "--client", "alice")


@pytest.fixture
async def served(certificates: Certificates) -> AsyncIterator[Served]:
    """Everything behind the certificate of a scheduler."""
    identity = certificates.identity("scheduler")
    running = await serve_everything(ServerSecurity(Access(identity), identity.tls))
    yield Served(certificates, running.port)
    await running.stop(0)


def test_every_service_has_a_rule() -> None:
    assert len(METHODS) > 8
    assert {service.full_name for service in all_services()} == ALLOWED.keys()


async def test_method_is_refused_when_it_has_no_rule(served: Served) -> None:
    channel = served.channel_of("scheduler")
    found = await served.call(channel, "/splitserve.scheduler.v1.NewService/Call")
    assert found == "CALLER_NOT_ALLOWED"


@pytest.mark.parametrize("caller", CALLERS)
async def test_certificate_opens_what_it_is_for(served: Served, caller: str) -> None:
    for method in METHODS:
        found = await served.call(served.channel_of(caller), method)
        expected = "answered" if caller in _allowed(method) else "CALLER_NOT_ALLOWED"
        assert found == expected, method


async def test_nobody_gets_in_without_a_certificate_of_the_cluster(
    served: Served, tmp_path: Path
) -> None:
    address, method = f"127.0.0.1:{served.port}", METHODS[0]
    options = [("grpc.ssl_target_name_override", Role.SCHEDULER.dns_name)]
    Certificates.make(tmp_path)
    ours = served.certificates.directory / "ca.crt"
    key, cert = (tmp_path / f"scheduler.{end}" for end in ("key", "crt"))
    forged = grpc.ssl_channel_credentials(ours.read_bytes(), key.read_bytes(), cert.read_bytes())
    for channel in (
        grpc.aio.insecure_channel(address),
        grpc.aio.secure_channel(address, served.certificates.client(), options),
        grpc.aio.secure_channel(address, forged, options),
    ):
        assert await served.call(channel, method) == "UNAVAILABLE"


async def test_nobody_is_dialed_who_is_somebody_else(served: Served) -> None:
    identity = served.certificates.identity("scheduler")
    # The scheduler looks for an executor, and finds a scheduler.
    channel = identity.channel(f"127.0.0.1:{served.port}", Role.EXECUTOR, channel_options())
    assert await served.call(channel, METHODS[0]) == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("given", "answer"),
    [(TOKEN, "answered"), (TOKEN[:-1], "CALLER_NOT_ALLOWED"), (None, "CALLER_NOT_ALLOWED")],
)
async def test_token_opens_the_cluster(given: str | None, answer: str) -> None:
    running = await serve_everything(ServerSecurity(_with_token()))
    metadata = ClusterIdentity(token=given).metadata
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        for method in METHODS:
            is_open = _allowed(method) == CALLERS
            found = await outcome(channel, method, metadata=metadata)
            assert found == ("answered" if is_open else answer), method
    await running.stop(0)


def _with_token() -> Access:
    return Access(ClusterIdentity(token=TOKEN))


@pytest.mark.parametrize("given", [TOKEN, None])
async def test_role_that_is_believed_needs_no_token_and_opens_nothing_else(
    given: str | None,
) -> None:
    access = Access(ClusterIdentity(token=TOKEN), unchecked=(Role.OPERATOR,))
    running = await serve_everything(ServerSecurity(access))
    metadata = ClusterIdentity(token=given).metadata
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        for method in METHODS:
            is_open = given is not None or "operator" in _allowed(method)
            found = await outcome(channel, method, metadata=metadata)
            assert found == ("answered" if is_open else "CALLER_NOT_ALLOWED"), method
    await running.stop(0)
