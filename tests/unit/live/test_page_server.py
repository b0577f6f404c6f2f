"""Who gets frames of the page's server, and who does not."""

from __future__ import annotations

import httpx2
import pytest
from starlette.requests import Request

from splitserve_client import ClientConfig
from splitserve_live.feeds import Feeds
from splitserve_live.server import build_page
from splitserve_rpc.discovery import Listed
from splitserve_rpc.domain_error import DomainError

NOBODY = "127.0.0.1:1"
HOSTS = ("localhost",)


async def operators_only(_: Request, credential: str) -> None:
    if credential != "operator":
        raise DomainError("CALLER_UNKNOWN", "the credential is not valid")


def visitor(
    *, hosts: tuple[str, ...] | None = HOSTS, knows_callers: bool = False
) -> httpx2.AsyncClient:
    feeds = Feeds(Listed([NOBODY]), ClientConfig())
    page = build_page(feeds, hosts, operators_only if knows_callers else None)
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(page), base_url="http://127.0.0.1:8001"
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8001", 200),
        ("[::1]:8001", 200),
        ("10.1.2.3", 200),
        ("localhost", 200),
        ("localhost:8001", 200),
        ("evil.example", 400),
        ("evil.example:8001", 400),
        ("127.0.0.1.evil", 400),
        ("localhost.evil:80", 400),
        ("", 400),
    ],
)
async def test_page_answers_by_addresses_and_names_of_this_machine_alone(
    host: str, status: int
) -> None:
    async with visitor() as client:
        for path in ("/", "/schedulers"):
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == status, (path, answer.text)


@pytest.mark.parametrize(
    ("site", "status"),
    [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)],
)
async def test_page_refuses_what_another_origin_asks(site: str, status: int) -> None:
    async with visitor() as client:
        answer = await client.get("/schedulers", headers={"sec-fetch-site": site})
        assert answer.status_code == status


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
