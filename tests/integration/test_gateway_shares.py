"""What one tenant leaves of a gateway to others, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from splitserve_gateway.sharing.turns import TurnPlaces
from tests.contract.stranger.process import poll
from tests.integration.test_gateway_callers import (
    ALICE,
    FILES,
    GATEWAY,
    OWN_KEY,
    Guarded,
    guarded,
)
from tests.support.fakes.fake_callers import KnowingScheduler, key
from tests.support.processes.gateway import url_of
from tests.support.processes.patience import PATIENCE_S

BOB = "sk-ss-bob-secret"
LONG = {"prompt": "t1 " * 1000}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Guarded]:
    scheduler = KnowingScheduler(tokenizer_files=FILES)
    scheduler.keys = {OWN_KEY: GATEWAY, ALICE: key("a"), BOB: key("b")}
    async with guarded(tmp_path, scheduler, max_concurrent_requests=20) as running:
        await running.wait_ready()
        yield running


async def test_bodies_that_never_come_hold_not_all_places(gateway: Guarded) -> None:
    url = urlsplit(url_of(gateway.server))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n"
    writers = []
    for _ in range(24):
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"{head}content-length: 100\r\n\r\n".encode())
        writers.append(writer)

    async def is_full() -> tuple[bool, int]:
        status = await gateway.status("GET", "/v1/models", ALICE)
        return status == 429, status

    await poll(is_full, PATIENCE_S)
    assert await gateway.status("GET", "/v1/models", BOB) == 200
    for writer in writers:
        writer.close()


async def test_tenants_take_turns_at_the_tokenizer(gateway: Guarded) -> None:
    places = TurnPlaces(1, 100)
    state = gateway.server.app.state
    state.gateway = replace(state.gateway, tokenizing=places)
    order: list[str] = []

    async def tokenize(credential: str) -> None:
        assert await gateway.status("POST", "/tokenize", credential, LONG) == 200
        order.append(credential)

    async def wait_for(num: int) -> None:
        async def ask() -> tuple[bool, int]:
            return places.num_waiting == num, places.num_waiting

        await poll(ask, PATIENCE_S)

    async with places.place("a"):
        tasks = [asyncio.create_task(tokenize(ALICE)) for _ in range(6)]
        await wait_for(6)
        tasks.append(asyncio.create_task(tokenize(BOB)))
        await wait_for(7)
        # What is small waits for none of it.
        assert await gateway.status("POST", "/tokenize", ALICE, {"prompt": "t1"}) == 200
    await asyncio.gather(*tasks)
    assert order.index(BOB) <= 3
