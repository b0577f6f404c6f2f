"""Attacker x action: every method of our protos at every address, and every route of the gateway.

What a caller may do is said here once more, by hand: what nobody has thought of is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from starlette.routing import Route

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig
from splitserve_rpc import failure_of
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import ALL_METHODS
from tests.support.security.secured_stack import CALLERS, SecuredStack

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEDULER = "splitserve.scheduler.v1.SchedulerService"
REGISTRY = "splitserve.scheduler.v1.RegistryService"
ADMIN = "splitserve.scheduler.v1.AdminService"
LIVE = "splitserve.scheduler.v1.LiveService"
EXECUTOR = "splitserve.executor.v1.ExecutorService"
ANSWERED, UNKNOWN, FORBIDDEN, NO_METHOD, NO_CONNECTION = (
    *("answered", "CALLER_UNKNOWN", "CALLER_NOT_ALLOWED"),
    *("METHOD_UNKNOWN", "UNAVAILABLE"),
)
TENANTS = {"tenant a", "tenant b"}
HAVE_KEYS = {*TENANTS, "gateway", "operator"}
HAVE_CERTIFICATES = {"an executor", "an operator", "a scheduler"}
# Who is answered, by method.
LET_IN: dict[str, set[str]] = {
    f"/{SCHEDULER}/Generate": TENANTS,
    f"/{SCHEDULER}/Abort": TENANTS,
    f"/{SCHEDULER}/Session": {*TENANTS, "gateway"},
    f"/{SCHEDULER}/GetModel": {*TENANTS, "gateway", "operator"},
    f"/{SCHEDULER}/GetTokenizer": {*TENANTS, "gateway"},
    f"/{SCHEDULER}/ListAdapters": {*TENANTS, "operator"},
    f"/{SCHEDULER}/Identify": {*TENANTS, "gateway"},
    f"/{REGISTRY}/Register": {"an executor"},
    f"/{REGISTRY}/Leave": {"an executor"},
    f"/{REGISTRY}/FetchAdapter": {"an executor"},
    f"/{ADMIN}/LoadAdapter": {"an operator"},
    f"/{ADMIN}/UnloadAdapter": {"an operator"},
    f"/{ADMIN}/ListExecutors": {"an operator"},
    f"/{ADMIN}/DrainExecutor": {"an operator"},
    f"/{ADMIN}/UndrainExecutor": {"an operator"},
    f"/{ADMIN}/Explain": {"an operator"},
    f"/{ADMIN}/ExplainQueue": {"an operator"},
    f"/{LIVE}/WatchScheduler": {"an operator"},
    f"/{EXECUTOR}/GetInfo": {"a scheduler"},
    f"/{EXECUTOR}/GetTokenizer": {"a scheduler"},
    f"/{EXECUTOR}/Execute": {"a scheduler"},
    f"/{EXECUTOR}/LoadAdapter": {"a scheduler"},
}
HEALTH = {"/health", "/health/live", "/health/ready"}
FOR_OPERATORS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


def expected_at_clients(method: str, caller: str) -> str:
    if SCHEDULER not in method:
        return NO_METHOD
    if caller not in HAVE_KEYS:
        return UNKNOWN
    return ANSWERED if caller in LET_IN[method] else FORBIDDEN


def expected_with_certificates(method: str, caller: str, services: tuple[str, ...]) -> str:
    if caller not in HAVE_CERTIFICATES:
        return NO_CONNECTION
    if not any(service in method for service in services):
        return NO_METHOD
    return ANSWERED if caller in LET_IN[method] else FORBIDDEN


async def outcome(stack: SecuredStack, caller: str, address: str, method: str) -> str:
    """Of a call with a message that every method can decode, and Identify answers."""
    asked = api.IdentifyRequest(credential=stack.keys["tenant a"]).SerializeToString()
    message = asked if method.endswith("/Identify") else b""
    async with stack.channel(caller, address) as channel:
        call = channel.unary_stream(method)(
            message, metadata=stack.metadata(caller), timeout=PATIENCE_S
        )
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            said = failure_of(error).reason or error.code().name
            assert said != "DEADLINE_EXCEEDED", (caller, method)
            return said if said in {UNKNOWN, FORBIDDEN, NO_METHOD, NO_CONNECTION} else ANSWERED
    return ANSWERED


async def outcomes(stack: SecuredStack, address: str) -> dict[tuple[str, str], str]:
    cells = [(method, caller) for method in ALL_METHODS for caller in CALLERS]
    said = await asyncio.gather(
        *(outcome(stack, caller, address, method) for method, caller in cells)
    )
    return dict(zip(cells, said, strict=True))


async def test_clients_reach_what_their_credential_is_for(stack: SecuredStack) -> None:
    assert await outcomes(stack, stack.clients) == {
        (method, caller): expected_at_clients(method, caller)
        for method in ALL_METHODS
        for caller in CALLERS
    }


@pytest.mark.parametrize("name", ["cluster", "executor"])
async def test_processes_reach_what_their_certificate_is_for(
    stack: SecuredStack, name: str
) -> None:
    address, services = {
        "cluster": (stack.cluster, (REGISTRY, ADMIN, LIVE)),
        "executor": (stack.executor, (EXECUTOR,)),
    }[name]
    assert await outcomes(stack, address) == {
        (method, caller): expected_with_certificates(method, caller, services)
        for method in ALL_METHODS
        for caller in CALLERS
    }
    assert stack.processes.are_alive()


def routes() -> Iterator[tuple[str, str]]:
    """Methods and paths of the gateway, and of what it does not have."""
    pending: list[Any] = list(build_app(GatewayConfig()).routes)
    while pending:
        route = pending.pop()
        if isinstance(route, Route):
            yield from ((method, route.path) for method in sorted(route.methods or ()))
        else:
            pending += route.original_router.routes
    yield "GET", "/no/such/path"
    yield "POST", "/admin"


def kind_of(status: int) -> str:
    return {401: UNKNOWN, 403: FORBIDDEN}.get(status, ANSWERED)


def expected_over_http(path: str, caller: str) -> str:
    if path in FOR_OPERATORS and caller in HAVE_KEYS:
        return ANSWERED if caller == "operator" else FORBIDDEN
    if path in HEALTH or caller in TENANTS:
        return ANSWERED
    return FORBIDDEN if caller in HAVE_KEYS else UNKNOWN


async def test_routes_are_for_who_may_generate(stack: SecuredStack) -> None:
    cells = [(method, path, caller) for method, path in routes() for caller in CALLERS]
    said = {}
    async with aclosing(stack.browser()) as browser:
        for method, path, caller in cells:
            answer = await browser.request(method, path, headers=stack.headers(caller), json={})
            assert answer.status_code < 500, (method, path, caller, answer.text)
            said[method, path, caller] = kind_of(answer.status_code)
    assert said == {
        (method, path, caller): expected_over_http(path, caller) for method, path, caller in cells
    }
