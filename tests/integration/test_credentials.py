"""Tests a scheduler process whose key file and issuer change while it runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_keys import ApiKey
from splitserve_rpc import failure_of
from tests.contract.stranger.process import poll
from tests.support.processes.processes import START_TIMEOUT_S, processes
from tests.support.security.credentials import KeyFile, bearer
from tests.support.security.issuer import AUDIENCE, Issuer, ec_key, http_server

UNKNOWN = "CALLER_UNKNOWN"


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler without an executor, its file of keys, and the issuer of its tokens.

    `first`: the key that was there at the start.
    """

    stub: scheduler_pb2_grpc.SchedulerServiceStub
    keys: KeyFile
    first: str
    issuer: Issuer

    async def identify(self, credential: str) -> api.IdentifyResponse | str:
        """Whose it is, or the reason why that is not said."""
        try:
            request = api.IdentifyRequest(credential=credential)
            answer: api.IdentifyResponse = await self.stub.Identify(
                request, metadata=bearer(credential), wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            return failure_of(error).reason
        return answer

    async def tenant_of(self, credential: str) -> str:
        """Its tenant, or the reason why that is not said."""
        answer = await self.identify(credential)
        return answer if isinstance(answer, str) else answer.tenant

    async def until(self, credential: str, expected: str) -> None:
        """Returns when that is the tenant, or the reason."""

        async def ask() -> tuple[bool, str]:
            found = await self.tenant_of(credential)
            return found == expected, found

        await poll(ask, START_TIMEOUT_S)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    issuer, keys = Issuer(now=int(time.time())), KeyFile(tmp_path)

    def answer(path: str) -> tuple[int, bytes]:
        if path == "/.well-known/openid-configuration":
            document = {"issuer": issuer.name, "jwks_uri": f"{issuer.name}/keys"}
            return 200, json.dumps(document).encode()
        return 200, issuer.key_set()

    with http_server(answer) as issuer.name, processes(tmp_path) as started:
        first = keys.add("first")
        flags = (f"--jwt-issuer={issuer.name}", f"--jwt-audience={AUDIENCE}")
        started.start_scheduler(f"--api-keys={keys.path}", *flags)
        async with grpc.aio.insecure_channel(started.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            yield Running(stub, keys, first, issuer)


async def test_keys_come_and_go_while_the_scheduler_runs(running: Running) -> None:
    first = running.first
    assert await running.tenant_of(first) == "first"
    assert await running.tenant_of(ApiKey.draw().text) == UNKNOWN

    second = running.keys.add("second", "--scope=generate", "--scope=tenants")
    await running.until(second, "second")
    answer = await running.identify(second)
    assert isinstance(answer, api.IdentifyResponse)
    key = ApiKey.parse(second)
    assert key is not None
    assert (answer.caller, list(answer.scopes)) == (f"key:{key.key_id}", ["generate", "tenants"])

    running.keys.revoke(second)
    await running.until(second, UNKNOWN)
    running.keys.path.write_text("spoiled")
    await asyncio.gather(*(running.tenant_of(first) for _ in range(20)))
    assert await running.tenant_of(first) == "first"


async def test_tokens_are_known_from_the_start(
    running: Running,
) -> None:
    token = running.issuer.token(tenant="tokens")
    assert await running.tenant_of(token) == "tokens"
    assert await running.tenant_of(running.issuer.token(aud="other")) == UNKNOWN
    assert await running.tenant_of(running.issuer.token(exp=running.issuer.now - 60)) == UNKNOWN

    running.issuer.keys = {"second": ec_key()}
    await running.until(running.issuer.token("second", tenant="tokens"), "tokens")
    assert await running.tenant_of(token) == UNKNOWN
