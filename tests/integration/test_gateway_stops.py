"""What ends a text at the gateway ends its request at the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.fake_service import StepWatch
from tests.support.processes.gateway import running_gateway, text_executor

MAX_TOKENS = 900


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
    tmp_path: Path, path: str, asked: dict[str, object], is_streamed: bool
) -> None:
    watch = StepWatch()
    # Every letter is a stop: each text ends within its first tokens.
    stop = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**asked, limit: MAX_TOKENS, "stop": stop, "stream": is_streamed, "seed": 1}
    async with running_gateway(text_executor(tmp_path, fault=watch)) as gateway:
        response = await gateway.http.post(path, json=body)
        assert response.status_code == 200, response.text
        await gateway.service.wait_idle()

        assert len(watch.steps) < MAX_TOKENS / 3
