"""Access to the live page of a gateway."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from splitserve_gateway.callers import Caller, KnownCallers
from splitserve_gateway.config import GatewayConfig, LiveConfig
from splitserve_gateway.live_page import LivePage
from splitserve_options import options
from splitserve_rpc import SecurityUnusable
from tests.support.processes.addresses import reserve_address

SCHEDULER = "127.0.0.1:1"


async def whose(credential: str) -> Caller | None:
    return {
        "operator": Caller(credential, may_generate=False, may_operate=True),
        "tenant": Caller(credential, tenant="team-a"),
    }.get(credential)


@asynccontextmanager
async def page(
    key_file: Path | None, listening: socket.socket | None = None
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of one that runs. `key_file`: of the gateway, if callers are known."""
    live = LiveConfig(reserve_address(), SCHEDULER)
    if listening is not None:
        # A copy, as a parent's child has.
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        live = LiveConfig(address, SCHEDULER, os.dup(listening.fileno()))
    config = GatewayConfig(gateway_key_file=key_file, live=live)
    running = LivePage(config, live, lambda: KnownCallers(whose, time.monotonic))
    running.start()
    await running.is_listening()
    try:
        async with httpx2.AsyncClient(base_url=f"http://{live.listen}", trust_env=False) as client:
            yield client
    finally:
        await running.close()


@pytest.mark.parametrize(
    ("credential", "status"), [("operator", 200), ("tenant", 403), ("nobody", 401), (None, 401)]
)
async def test_live_page_answers_operators_alone_where_callers_are_known(
    tmp_path: Path, credential: str | None, status: int
) -> None:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    async with page(tmp_path / "key") as client:
        answer = await client.get("/schedulers", headers=headers)
        assert answer.status_code == status, answer.text


async def test_live_page_answers_who_is_near_where_nobody_is_known() -> None:
    async with page(None) as client:
        assert (await client.get("/schedulers")).json() == {"schedulers": [SCHEDULER]}
        elsewhere = await client.get("/schedulers", headers={"host": "evil.example"})
        assert elsewhere.status_code == 400


async def test_live_page_is_served_again_on_a_parent_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for _ in range(2):
            async with page(None, listening) as client:
                assert (await client.get("/schedulers")).status_code == 200


def test_gateway_refuses_to_show_the_page_to_everybody() -> None:
    values = options.parse("gateway", ["--live-listen", "0.0.0.0:8001"], {})
    with pytest.raises(
        SecurityUnusable, match=r"--live-listen 0\.0\.0\.0:8001: other machines can reach it"
    ):
        GatewayConfig.from_options(values)
