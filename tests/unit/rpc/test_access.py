"""Access of every caller to every method of all services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import pytest

from splitserve_contract import DomainError
from splitserve_keys import Scope
from splitserve_rpc import (
    RULES,
    Access,
    ClusterIdentity,
    Role,
    ServerSecurity,
    bearer_credential,
    channel_options,
    is_credential,
)
from tests.support.security.cluster import (
    ALL_METHODS,
    Certificates,
    all_services,
    outcome_of_call,
    serve_everything,
)
from tests.support.security.credentials import bearer

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
            return await outcome_of_call(channel, method)


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
    assert len(ALL_METHODS) > 8
    assert {service.full_name for service in all_services()} == ALLOWED.keys()


async def test_method_is_refused_when_it_has_no_rule(served: Served) -> None:
    channel = served.channel_of("scheduler")
    found = await served.call(channel, "/splitserve.scheduler.v1.NewService/Call")
    assert found == "CALLER_NOT_ALLOWED"


@pytest.mark.parametrize("caller", CALLERS)
async def test_certificate_opens_what_it_is_for(served: Served, caller: str) -> None:
    for method in ALL_METHODS:
        found = await served.call(served.channel_of(caller), method)
        expected = "answered" if caller in _allowed(method) else "CALLER_NOT_ALLOWED"
        assert found == expected, method


async def test_nobody_gets_in_without_a_certificate_of_the_cluster(
    served: Served, tmp_path: Path
) -> None:
    address, method = f"127.0.0.1:{served.port}", ALL_METHODS[0]
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
    assert await served.call(channel, ALL_METHODS[0]) == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("given", "answer"),
    [(TOKEN, "answered"), (TOKEN[:-1], "CALLER_NOT_ALLOWED"), (None, "CALLER_NOT_ALLOWED")],
)
async def test_token_opens_the_cluster(given: str | None, answer: str) -> None:
    running = await serve_everything(ServerSecurity(_with_token()))
    metadata = ClusterIdentity(token=given).metadata
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        for method in ALL_METHODS:
            is_open = _allowed(method) == CALLERS
            found = await outcome_of_call(channel, method, metadata=metadata)
            assert found == ("answered" if is_open else answer), method
    await running.stop(0)


def _with_token() -> Access:
    return Access(ClusterIdentity(token=TOKEN))


@pytest.mark.parametrize("given", [TOKEN, None])
async def test_believed_role_needs_no_token_for_its_own_methods(
    given: str | None,
) -> None:
    access = Access(ClusterIdentity(token=TOKEN), unchecked=(Role.OPERATOR,))
    running = await serve_everything(ServerSecurity(access))
    metadata = ClusterIdentity(token=given).metadata
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        for method in ALL_METHODS:
            is_open = given is not None or "operator" in _allowed(method)
            found = await outcome_of_call(channel, method, metadata=metadata)
            assert found == ("answered" if is_open else "CALLER_NOT_ALLOWED"), method
    await running.stop(0)


HEALTH = "/grpc.health.v1.Health/Check"
CLIENTS = "splitserve.scheduler.v1.SchedulerService"
OPERATORS = ("splitserve.scheduler.v1.AdminService", "splitserve.scheduler.v1.LiveService")
FOR_GATEWAYS = {"Session", "GetModel", "GetTokenizer", "Identify"}
Metadata: TypeAlias = tuple[tuple[str, str], ...]
SCOPES = [scope.value for scope in Scope]


def scopes_of(credential: str) -> Collection[str]:
    """A credential here says what it is for."""
    if not credential:
        raise DomainError("CALLER_UNKNOWN", "no valid credential")
    return credential.split("+")


def opened_by(scope: str, method: str) -> bool:
    service, name = method.removeprefix("/").split("/")
    if service in OPERATORS:
        return scope == "operator"
    allowed = {"gateway": FOR_GATEWAYS, "operator": {"GetModel", "ListAdapters"}}
    return scope == "generate" or name in allowed.get(scope, ())


async def outcomes(access: Access, metadata: Metadata) -> dict[str, str]:
    """Of every method, and of health."""
    running = await serve_everything(ServerSecurity(access))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            return {
                method: await outcome_of_call(channel, method, metadata=metadata)
                for method in (*ALL_METHODS, HEALTH)
            }
    finally:
        await running.stop(0)


def of_callers(found: dict[str, str]) -> dict[str, str]:
    """Of the services that credentials are for."""
    return {
        method: answer
        for method, answer in found.items()
        if method.split("/")[1] in (CLIENTS, *OPERATORS)
    }


def test_rules_know_no_scope_that_is_none() -> None:
    assert {scope for rule in RULES.values() for scope in rule.scopes} <= set(SCOPES)


@pytest.mark.parametrize("scope", SCOPES)
async def test_scope_opens_what_it_is_for(scope: str) -> None:
    found = await outcomes(Access(scopes_of=scopes_of), bearer(scope))
    expected = {
        method: "answered" if opened_by(scope, method) else "CALLER_NOT_ALLOWED"
        for method in of_callers(found)
    }
    assert len(expected) > 6
    assert of_callers(found) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer "),),
        (("authorization", "Basic generate"),),
        bearer("generate") * 2,
    ],
)
async def test_nothing_but_health_answers_when_no_usable_credential_is_shown(
    metadata: Metadata,
) -> None:
    found = await outcomes(Access(scopes_of=scopes_of), metadata)
    assert set(of_callers(found).values()) == {"CALLER_UNKNOWN"}
    assert found[HEALTH] != "CALLER_UNKNOWN"


@pytest.mark.parametrize(
    ("credential", "token", "answer"),
    [
        (None, TOKEN, "answered"),
        (None, None, "CALLER_NOT_ALLOWED"),
        ("operator", None, "answered"),
        ("operator", TOKEN, "answered"),
        ("generate", TOKEN, "answered"),
        ("", TOKEN, "answered"),
        ("generate", None, "CALLER_NOT_ALLOWED"),
        ("", None, "CALLER_NOT_ALLOWED"),
    ],
)
async def test_operators_come_by_the_cluster_or_by_a_credential(
    credential: str | None, token: str | None, answer: str
) -> None:
    metadata = (*ClusterIdentity(token=token).metadata, *bearer(credential))
    found = await outcomes(Access(ClusterIdentity(token=TOKEN), scopes_of), metadata)
    assert {found[method] for method in ALL_METHODS if method.split("/")[1] in OPERATORS} == {
        answer
    }


@pytest.mark.parametrize(
    ("credential", "answer"),
    [("operator", "answered"), ("generate", "CALLER_NOT_ALLOWED"), ("", "CALLER_UNKNOWN")],
)
async def test_operator_needs_a_credential_when_callers_are_known(
    credential: str, answer: str
) -> None:
    access = Access(ClusterIdentity(token=TOKEN), scopes_of, unchecked=(Role.OPERATOR,))
    found = await outcomes(access, bearer(credential))
    assert {found[method] for method in ALL_METHODS if method.split("/")[1] in OPERATORS} == {
        answer
    }


async def test_credential_opens_nothing_of_the_cluster() -> None:
    """Also at the one address of all, where a token is what its processes know each other by."""
    found = await outcomes(
        Access(ClusterIdentity(token=TOKEN), scopes_of), bearer("+".join(SCOPES))
    )
    of_cluster = {
        found[method] for method in ALL_METHODS if method.split("/")[1] not in (CLIENTS, *OPERATORS)
    }
    assert of_cluster == {"CALLER_NOT_ALLOWED"}


async def test_credentials_are_not_looked_at_when_nobody_is_known() -> None:
    found = await outcomes(Access(), (("authorization", "Basic nonsense"),))
    assert {found[method] for method in ALL_METHODS} == {"answered"}


@pytest.mark.parametrize(
    ("metadata", "credential"),
    [
        ((), ""),
        ((("user-agent", "Bearer x"),), ""),
        ((("authorization", "Bearer a.b-c"),), "a.b-c"),
        ((("authorization", "bearer  x "),), "x"),
        ((("authorization", "Bearer"),), ""),
        ((("authorization", "Bearer \x85x"),), "\x85x"),
    ],
)
def test_credential_is_what_follows_bearer(
    metadata: tuple[tuple[str, str], ...], credential: str
) -> None:
    assert bearer_credential(metadata) == credential


@pytest.mark.parametrize("text", ["!", "~", "a.b-c", "x" * 8192])
def test_text_is_a_credential_when_it_is_visible(text: str) -> None:
    assert is_credential(text)


@pytest.mark.parametrize("text", ["", "a b", "a\t", "\x7f", "\x00", "ä", "x" * 8193])
def test_text_is_no_credential_when_invalid_in_a_header(text: str) -> None:
    assert not is_credential(text)


@pytest.mark.parametrize("given", [["Basic abc"], ["abc"], [""], ["Bearer a", "Bearer b"]])
def test_authorization_is_refused_when_it_is_not_one_bearer(
    given: list[str],
) -> None:
    metadata = [("authorization", text) for text in given]
    with pytest.raises(DomainError) as caught:
        bearer_credential(metadata)
    assert caught.value.reason == "CALLER_UNKNOWN"
    assert "abc" not in caught.value.message
