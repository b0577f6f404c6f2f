"""The limit of logprobs in one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from splitserve_gateway.generation import text_requests as scores
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "hello"}]
MAX_SCORES = 60
ECHOED = {"prompt": [7] * 31, "echo": True, "logprobs": 1, "stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path_factory.mktemp("files"))) as running:
        yield running


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MAX_SCORES", MAX_SCORES)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "logprobs": 3}, "logprobs"),
        (
            COMPLETIONS,
            {"prompt": [7] * 31, "echo": True, "logprobs": 1, "stream": True},
            "logprobs",
        ),
        (COMPLETIONS, {"prompt": [[7] * 8] * 2, "n": 4, "prompt_logprobs": 0}, "prompt_logprobs"),
        (
            CHATS,
            {"messages": MESSAGES, "max_tokens": 11, "logprobs": True, "top_logprobs": 5},
            "top_logprobs",
        ),
        (
            RESPONSES,
            {
                "input": "hello",
                "max_output_tokens": 11,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 5,
            },
            "top_logprobs",
        ),
    ],
)
async def test_answer_is_refused_when_it_has_too_many_logprobs(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    error = await gateway.refusal(path, {**body, "ignore_eos": True})

    assert (error["code"], error["param"]) == ("too_many_logprobs", param)
    assert f"at most {MAX_SCORES}" in error["message"]
    await gateway.service.wait_idle()


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_answer_is_streamed_however_many_logprobs_it_has(
    gateway: RunningGateway, path: str
) -> None:
    scored = {"logprobs": 5} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    events = await gateway.stream(path, **prompt, **scored, max_tokens=40, ignore_eos=True)

    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_answer_is_whole_when_at_the_limit_of_logprobs(
    gateway: RunningGateway,
) -> None:
    answer = await gateway.post(COMPLETIONS, prompt="a", max_tokens=10, logprobs=5, ignore_eos=True)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 10
    answer = await gateway.post(COMPLETIONS, prompt=[7] * 30, echo=True, logprobs=1, max_tokens=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 30
