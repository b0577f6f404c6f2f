"""The live page at a real port in this process, and a browser that looks at it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright
from starlette.types import ASGIApp

from splitserve_client import ClientConfig
from splitserve_common import StaticDiscovery
from splitserve_gateway.server import HttpServer
from splitserve_live import Feeds
from splitserve_live.server import Check, build_page
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S

# Of Debian, and of those who bring their own.
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A browser in a container has no user of its own to be kept in.
_FLAGS = ("--no-sandbox", "--disable-gpu")


@asynccontextmanager
async def live_page(
    schedulers: Sequence[str], hosts: Sequence[str] | None = None, check: Check | None = None
) -> AsyncIterator[str]:
    """The page of `schedulers`; its URL."""
    feeds = Feeds(StaticDiscovery(list(schedulers)), ClientConfig())
    async with serving(build_page(feeds, hosts, check)) as address:
        try:
            yield f"http://{address}/"
        finally:
            feeds.close()


@asynccontextmanager
async def serving(page: ASGIApp) -> AsyncIterator[str]:
    """Serves the page; yields its address."""
    address = reserve_address()
    server = HttpServer(page, address, None, 64)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await server.is_listening.wait()
        yield address
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Chromium without a window; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(_BROWSERS)} is installed")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield running
        await running.close()
