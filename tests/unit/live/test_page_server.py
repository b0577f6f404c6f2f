"""Tests who gets frames of the page's server."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from starlette.requests import Request

from splitserve_client import ClientConfig
from splitserve_common import StaticDiscovery
from splitserve_contract import DomainError
from splitserve_live import Feeds
from splitserve_live.server import build_page
from tests.support.processes.live_page import serving
from tests.support.processes.patience import PATIENCE_S

NOBODY = "127.0.0.1:1"
HOSTS = ("localhost",)


async def operators_only(_: Request, credential: str) -> None:
    if credential != "operator":
        raise DomainError("CALLER_UNKNOWN", "the credential is not valid")


def visitor(
    *, hosts: tuple[str, ...] | None = HOSTS, knows_callers: bool = False
) -> httpx2.AsyncClient:
    feeds = Feeds(StaticDiscovery([NOBODY]), ClientConfig())
    page = build_page(feeds, hosts, operators_only if knows_callers else None)
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(page), base_url="http://127.0.0.1:8001"
    )


@pytest.mark.parametrize("path", ["/feed", "/schedulers", "/life?request=one"])
@pytest.mark.parametrize("credential", [None, "stranger"])
async def test_page_tells_nothing_without_a_credential_where_callers_are_known(
    path: str, credential: str | None
) -> None:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    async with visitor(knows_callers=True) as client:
        answer = await client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["reason"] == "CALLER_UNKNOWN"
        # The page itself is no secret, and asks for the key.
        assert (await client.get("/")).status_code == 200


async def test_page_says_who_it_shows_to_an_operator() -> None:
    async with visitor(knows_callers=True) as client:
        answer = await client.get("/schedulers", headers={"authorization": "Bearer operator"})
        assert answer.json() == {"schedulers": [NOBODY]}


@pytest.mark.parametrize(
    ("query", "status"),
    [("rate=x", 400), ("rate=100", 400), ("scheduler=elsewhere:1", 404), ("", 503)],
)
async def test_feed_is_refused_with_a_reason(query: str, status: int) -> None:
    async with visitor() as client:
        answer = await client.get(f"/feed?{query}")
        assert answer.status_code == status, answer.text
        assert answer.json()["message"]


async def test_page_lets_a_browser_load_nothing_from_elsewhere() -> None:
    async with visitor() as client:
        answer = await client.get("/")
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


class EndlessFeeds(Feeds):
    """One feed whose lines are long and never end."""

    def __init__(self) -> None:
        super().__init__(StaticDiscovery([NOBODY]), ClientConfig())
        self.has_ended = asyncio.Event()

    @asynccontextmanager
    async def open(
        self, scheduler: str, credential: str, frames_per_second: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        try:
            yield self._long_lines()
        finally:
            self.has_ended.set()

    async def _long_lines(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x" * 2**20
            await asyncio.sleep(0)


async def test_head_of_a_feed_ends_and_leaves_no_watcher() -> None:
    feeds = EndlessFeeds()
    async with serving(build_page(feeds, None)) as address:
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HEAD /feed HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head = await reader.read()
            await feeds.has_ended.wait()
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")


async def test_who_looks_but_does_not_read_loses_the_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feeds = EndlessFeeds()
    loop = asyncio.get_running_loop()
    with socket.socket() as visit, caplog.at_level(logging.ERROR):
        visit.setblocking(False)
        async with serving(build_page(feeds, None, unread_s=0.05)) as address:
            host, _, port = address.rpartition(":")
            await loop.sock_connect(visit, (host, int(port)))
            await loop.sock_sendall(visit, b"GET /feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await feeds.has_ended.wait()
                # And then it has an end.
                while await loop.sock_recv(visit, 2**20):
                    pass
    assert not caplog.records
