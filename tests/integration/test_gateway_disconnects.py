"""Clients that leave: their requests are aborted, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from splitserve_client import Tokenizer
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.grammars import GrammarChecker
from tests.support.processes.fake_service import seeds_of
from tests.support.processes.gateway import (
    RunningGateway,
    WatchedGateway,
    post_bytes,
    running_gateway,
    text_executor,
    watched_gateway,
)
from tests.support.processes.http_clients import Leftovers, leave_often, wait_for_nothing
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import Certificates

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/completions"
LONG = "word " * 600
USER: Any = {"messages": [{"role": "user", "content": "hello"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedGateway]:
    """A gateway before one sequence at a time."""
    async with watched_gateway(tmp_path_factory.mktemp("tokenizer"), max_num_seqs=1) as running:
        gateway, _ = running
        # Whatever is made once, for all requests, is there after the first ones.
        await gateway.post(PATH, prompt="x", max_tokens=1)
        await gateway.refusal(PATH, {"prompt": "x", "structured_outputs": {"regex": "("}})
        await gateway.http.aclose()
        yield running


@asynccontextmanager
async def holding(watched: WatchedGateway) -> AsyncIterator[WatchedGateway]:
    """The executor holds the next step. Afterwards waits until nothing is left."""
    gateway, watch = watched
    await gateway.service.wait_idle()
    watch.steps.clear()
    watch.hold()
    before = Leftovers.now()
    try:
        yield gateway, watch
    finally:
        watch.release()
    await wait_for_nothing(gateway.server, gateway.service, before)


async def leave(gateway: RunningGateway, writer: asyncio.StreamWriter, num_others: int = 0) -> None:
    """Closes the connection, and waits until the gateway has only the requests of others."""
    writer.close()
    fleet = gateway.server.app.state.gateway.fleet
    await gateway.until(lambda: gateway.server.exchanges.num_open == num_others)
    await gateway.until(lambda: fleet.num_session_requests == num_others)


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_gateway_keeps_nothing_when_clients_leave_at_random_places(
    tmp_path: Path, is_encrypted: bool
) -> None:
    files = Certificates.make(tmp_path).files("gateway", ca=False) if is_encrypted else None
    config = GatewayConfig(http_tls=files)
    async with running_gateway(text_executor(tmp_path), config=config) as gateway:
        # Whatever is made once, for all requests, is there after the first ones.
        await leave_often(gateway, 20, 4, random.Random(1))
        await gateway.http.aclose()
        await gateway.service.wait_idle()
        before = Leftovers.now()
        await leave_often(gateway, 150, 32, random.Random(2))
        await wait_for_nothing(gateway.server, gateway.service, before)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_request_is_aborted_when_client_leaves_the_queue(
    watched: WatchedGateway, is_streamed: bool
) -> None:
    body = {"prompt": "one two", "max_tokens": 5, "stream": is_streamed}
    async with holding(watched) as (gateway, watch):
        _, first = await gateway.connect()
        first.write(post_bytes(PATH, {**body, "seed": 1}))
        await watch.wait_held()
        _, second = await gateway.connect()
        second.write(post_bytes(PATH, {**body, "seed": 2}))
        await gateway.service.wait_until_queued(1)
        await leave(gateway, second, num_others=1)
        # No step was needed for it.
        await gateway.service.wait_until_queued(0)
        watch.release()
        await gateway.until(lambda: gateway.server.exchanges.num_open == 0)
        first.close()
        assert set(seeds_of(watch.steps)) == {1}


async def test_request_is_aborted_when_client_leaves_without_an_executor(
    watched: WatchedGateway,
) -> None:
    async with holding(watched) as (gateway, watch):
        _, running = await gateway.connect()
        running.write(post_bytes(PATH, {"prompt": "one", "max_tokens": 900}))
        await watch.wait_held()
        await gateway.service.kill(gateway.service.executors[0], watch)
        _, waiting = await gateway.connect()
        waiting.write(post_bytes(PATH, {"prompt": "two", "max_tokens": 900}))
        await gateway.service.wait_for(lambda listed: listed.num_unassigned_requests == 2)
        await leave(gateway, running, num_others=1)
        await leave(gateway, waiting)
        await gateway.service.wait_for(lambda listed: listed.num_unassigned_requests == 0)
        await gateway.service.executors[0].start()
        await gateway.service.wait_connected(1)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("encode", PATH, {"prompt": LONG}),
        ("encode", "/tokenize", {"prompt": LONG}),
        ("encode", "/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("render_chat", "/v1/chat/completions", {**USER, "stream": True}),
        ("render_chat", "/v1/responses", {"input": "hello"}),
        ("render_chat", "/v1/messages", {**USER, "max_tokens": 5}),
        ("render_chat", "/v1/messages/count_tokens", USER),
    ],
)
async def test_request_is_aborted_when_client_leaves_during_tokenization(
    watched: WatchedGateway,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    body: dict[str, Any],
) -> None:
    has_begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    original = getattr(Tokenizer, method)

    def held(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        loop.call_soon_threadsafe(has_begun.set)
        assert may_end.wait(PATIENCE_S)
        return original(*arguments, **options)

    async with holding(watched) as (gateway, watch):
        monkeypatch.setattr(Tokenizer, method, held)
        _, writer = await gateway.connect()
        writer.write(post_bytes(path, body))
        await has_begun.wait()
        await leave(gateway, writer)
        may_end.set()
        assert watch.steps == []


async def test_request_is_aborted_when_client_leaves_during_grammar_check(
    watched: WatchedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()
    check = GrammarChecker.check

    async def held(*arguments: Any) -> Any:  # noqa: ANN401
        has_begun.set()
        await may_end.wait()
        return await check(*arguments)

    async with holding(watched) as (gateway, watch):
        monkeypatch.setattr(GrammarChecker, "check", held)
        _, writer = await gateway.connect()
        writer.write(post_bytes(PATH, {"prompt": "x", "structured_outputs": {"regex": "[a-z]{3}"}}))
        await has_begun.wait()
        await leave(gateway, writer)
        may_end.set()
        assert watch.steps == []
