"""What a credential opens: every method of every service, for every scope."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import grpc.aio
import pytest

from splitserve_keys.key_file import Scope
from splitserve_rpc.access import RULES, Access, ClusterIdentity, Role
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.server import ServerSecurity
from tests.support.security.bearer import bearer
from tests.support.security.everything import METHODS, outcome, serve_everything

TOKEN = "a secret of all of them"
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
    allowed = {"gateway": FOR_GATEWAYS, "operator": {"GetModel"}}
    return scope == "generate" or name in allowed.get(scope, ())


async def outcomes(access: Access, metadata: Metadata) -> dict[str, str]:
    """Of every method, and of health."""
    running = await serve_everything(ServerSecurity(access))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            return {
                method: await outcome(channel, method, metadata=metadata)
                for method in (*METHODS, HEALTH)
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
    assert {found[method] for method in METHODS if method.split("/")[1] in OPERATORS} == {answer}


@pytest.mark.parametrize(
    ("credential", "answer"),
    [("operator", "answered"), ("generate", "CALLER_NOT_ALLOWED"), ("", "CALLER_UNKNOWN")],
)
async def test_operators_who_need_no_token_need_a_credential_where_callers_are_known(
    credential: str, answer: str
) -> None:
    access = Access(ClusterIdentity(token=TOKEN), scopes_of, unchecked=(Role.OPERATOR,))
    found = await outcomes(access, bearer(credential))
    assert {found[method] for method in METHODS if method.split("/")[1] in OPERATORS} == {answer}


async def test_credential_opens_nothing_of_the_cluster() -> None:
    """Also at the one address of all, where a token is what its processes know each other by."""
    found = await outcomes(
        Access(ClusterIdentity(token=TOKEN), scopes_of), bearer("+".join(SCOPES))
    )
    of_cluster = {
        found[method] for method in METHODS if method.split("/")[1] not in (CLIENTS, *OPERATORS)
    }
    assert of_cluster == {"CALLER_NOT_ALLOWED"}


async def test_credentials_are_not_looked_at_when_nobody_is_known() -> None:
    found = await outcomes(Access(), (("authorization", "Basic nonsense"),))
    assert {found[method] for method in METHODS} == {"answered"}
