"""Tests requests of browsers to every listener that asks for no credential."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from splitserve_client import ClientConfig
from splitserve_common import StaticDiscovery
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_live import Feeds
from splitserve_live.server import build_page
from splitserve_metrics import MetricsAddress, MetricsListener, Page
from tests.support.processes.gateway import serving as serving_gateway
from tests.support.processes.live_page import serving as serving_page
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOBODY = "127.0.0.1:1"
ALLOWED = "api.example.org"
ORIGIN = "https://page.example"
# Of each listener, and the status of what nobody refuses.
TARGETS = {
    "api": ("/health/live", 200),
    "health": ("/health/ready", 503),
    "live": ("/schedulers", 200),
    "live_feed": ("/feed?scheduler=nobody:1", 404),
    "metrics": ("/metrics", 200),
}
PAGES = {
    "no page": ("", None),
    "host that is listed": (f"host: {ALLOWED}\r\n", None),
    "host of Compose": ("host: gateway:8000\r\n", None),
    "page of this address": ("host: localhost:8\r\norigin: http://localhost:8\r\n", None),
    "user types the address": ("sec-fetch-site: none\r\n", None),
    "DNS rebinding": ("host: evil.example\r\n", 400),
    "DNS rebinding, same origin": ("host: evil.example\r\nsec-fetch-site: same-origin\r\n", 400),
    "page of elsewhere": ("origin: https://evil.example\r\n", 403),
    "page in a sandbox": ("origin: null\r\n", 403),
    "image of elsewhere": ("sec-fetch-site: cross-site\r\nsec-fetch-mode: no-cors\r\n", 403),
    "page of another port": ("origin: http://127.0.0.1:1\r\nsec-fetch-site: same-site\r\n", 403),
}
SPENDS = b'{"prompt": "x", "max_tokens": 100000}'


@dataclass(frozen=True, slots=True)
class Listeners:
    """The address of each."""

    addresses: dict[str, str]

    async def status(self, listener: str, method: str, path: str, head: str = "") -> int:
        """Of the answer to a request with the lines of `head`."""
        host, _, port = self.addresses[listener.partition("_")[0]].rpartition(":")
        if "host:" not in head:
            head = f"host: {host}:{port}\r\n{head}"
        body = SPENDS if method == "POST" else b""
        length = f"content-length: {len(body)}\r\n" if body else ""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{method} {path} HTTP/1.1\r\n{head}{length}\r\n".encode() + body)
            line = await reader.readline()
            writer.transport.abort()
        return int(line.split()[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listeners() -> AsyncIterator[Listeners]:
    """Without schedulers: what is refused is refused before anybody is asked."""
    config = GatewayConfig(schedulers=NOBODY, allowed_hosts=(ALLOWED,))
    feeds = Feeds(StaticDiscovery([NOBODY]), ClientConfig())
    metrics = MetricsListener(
        MetricsAddress("127.0.0.1:0", allowed_hosts=(ALLOWED,)),
        lambda: Page(CollectorRegistry(), []),
    )
    async with (
        serving_gateway(config) as gateway,
        serving_page(build_page(feeds, config.hosts("127.0.0.1:0"))) as live,
    ):
        at = await metrics.start()
        yield Listeners(
            {"api": _address(gateway), "live": live, "metrics": at, "health": _address(gateway)}
        )
        await metrics.close()
        feeds.close()


@pytest.mark.parametrize("listener", TARGETS)
@pytest.mark.parametrize("page", PAGES)
async def test_listener_without_callers_refuses_pages_of_elsewhere(
    listeners: Listeners, listener: str, page: str
) -> None:
    path, usual = TARGETS[listener]
    head, refused = PAGES[page]
    assert await listeners.status(listener, "GET", path, head) == (refused or usual)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        # As `fetch` with a Blob: no type, and no preflight.
        ("origin: https://evil.example\r\n", 403),
        ("", 415),
        ("content-type: text/plain\r\n", 415),
        ("content-type: application/x-www-form-urlencoded\r\n", 415),
        ("content-type: text/plain; application/json\r\n", 415),
        ("content-type: text/plain\r\ncontent-type: application/json\r\n", 415),
        # A type that a page can only name after a preflight, which is refused.
        ("content-type: application/json\r\norigin: https://evil.example\r\n", 403),
        # Programs: as far as there is a scheduler.
        ("content-type: application/json\r\n", 503),
        ("Content-Type: Application/JSON; charset=utf-8\r\n", 503),
    ],
)
async def test_page_cannot_spend_the_machine_where_nobody_needs_a_key(
    listeners: Listeners, head: str, status: int
) -> None:
    assert await listeners.status("api", "POST", "/v1/completions", head) == status


async def test_preflight_is_refused_when_no_origin_is_allowed(listeners: Listeners) -> None:
    asks = "origin: https://evil.example\r\naccess-control-request-method: POST\r\n"
    assert await listeners.status("api", "OPTIONS", "/v1/completions", asks) == 403


async def test_page_may_ask_when_its_origin_is_allowed() -> None:
    config = GatewayConfig(schedulers=NOBODY, http_cors_origins=(ORIGIN,))
    async with serving_gateway(config) as gateway:
        listeners = Listeners({"api": _address(gateway)})
        asks = f"origin: {ORIGIN}\r\nsec-fetch-site: cross-site\r\n"
        preflight = f"{asks}access-control-request-method: POST\r\n"
        path = "/v1/completions"
        assert await listeners.status("api", "OPTIONS", path, preflight) == 200
        post = f"{asks}content-type: application/json\r\n"
        assert await listeners.status("api", "POST", path, post) == 503
        assert await listeners.status("api", "POST", path, post + "host: evil.example\r\n") == 400
        other = post.replace(ORIGIN, "https://evil.example")
        assert await listeners.status("api", "POST", path, other) == 403


async def test_credentials_replace_guards_but_for_health(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("the-key-of-the-gateway")
    config = GatewayConfig(schedulers=NOBODY, gateway_key_file=key_file)
    async with serving_gateway(config) as gateway:
        listeners = Listeners({"api": _address(gateway)})
        for head in ("host: evil.example\r\n", "origin: https://evil.example\r\n"):
            assert await listeners.status("api", "GET", "/health/live", head) == 200
            assert await listeners.status("api", "GET", "/v1/models", head) == 401
        for path, status in (("/health", 503), ("/health/x", 401), ("/health/", 401)):
            assert await listeners.status("api", "GET", path) == status


def _address(gateway: Server) -> str:
    return f"{gateway.config.host}:{gateway.config.port}"
