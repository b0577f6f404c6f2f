"""What ends a text at the gateway ends its request at the scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.processes.gateway import WatchedGateway, watched_gateway

MAX_TOKENS = 900
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedGateway]:
    async with watched_gateway(tmp_path_factory.mktemp("tokenizer")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "the fox"}),
        ("/v1/completions", {"prompt": "the fox", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the fox?"}]}),
        ("/v1/responses", {"input": "the fox?"}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_request_is_not_computed_on_when_a_stop_string_ended_its_text(
    watched: WatchedGateway,
    path: str,
    asked: dict[str, object],
    is_streamed: bool,
) -> None:
    gateway, watch = watched
    # Every letter is a stop: each text ends within its first tokens.
    stop = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**asked, limit: MAX_TOKENS, "stop": stop, "stream": is_streamed, "seed": 1}
    num_before = len(watch.steps)
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    await gateway.service.wait_idle()

    assert len(watch.steps) - num_before < MAX_TOKENS / 3
