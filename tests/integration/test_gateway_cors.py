"""CORS: answers to browsers with pages of other origins."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from splitserve_gateway.config import GatewayConfig
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
ORIGIN = "https://page.example"
PATH = "/v1/completions"
ALLOWED = "access-control-allow-origin"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("files"))
    config = GatewayConfig(http_cors_origins=(ORIGIN, "http://localhost:3000"))
    async with running_gateway(executor, config=config) as running:
        yield running


async def preflight(gateway: RunningGateway, origin: str, method: str = "POST") -> dict[str, str]:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    answer = await gateway.http.request("OPTIONS", PATH, headers=headers)
    return {"status": str(answer.status_code), **answer.headers}


async def test_page_may_ask_when_its_origin_is_listed(gateway: RunningGateway) -> None:
    for origin in (ORIGIN, "http://localhost:3000"):
        answer = await preflight(gateway, origin)
        assert (answer["status"], answer[ALLOWED]) == ("200", origin)
        assert "POST" in answer["access-control-allow-methods"]
        assert "x-stainless-os" in answer["access-control-allow-headers"]


async def test_page_may_not_ask_when_its_origin_is_not_listed(gateway: RunningGateway) -> None:
    answer = await preflight(gateway, "https://other.example")
    assert answer["status"] == "400"
    assert ALLOWED not in answer
    assert (await preflight(gateway, ORIGIN, "DELETE"))["status"] == "400"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", PATH, {"prompt": "a", "max_tokens": 2}, 200),
        ("POST", PATH, {"prompt": "a", "max_tokens": 2, "stream": True}, 200),
        ("POST", PATH, {"prompt": 5}, 400),
        ("GET", "/v1/nothing", None, 404),
        ("GET", PATH, None, 405),
    ],
)
async def test_page_may_read_what_is_answered(
    gateway: RunningGateway, method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    answer = await gateway.http.request(method, path, json=body, headers={"origin": ORIGIN})

    assert answer.status_code == status
    assert answer.headers[ALLOWED] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.headers["x-request-id"]


async def test_page_may_read_that_the_gateway_takes_nothing_more(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.server.exchanges, "is_draining", True)
    answer = await gateway.http.post(PATH, json={"prompt": "a"}, headers={"origin": ORIGIN})

    assert (answer.status_code, answer.headers[ALLOWED]) == (503, ORIGIN)
