"""Every request that openapi.json allows is accepted, field by field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.openapi_examples import offered_bodies
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "one"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": "one", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "one", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [1]},
}
# What else a request has when it has a field: that is told by words, and not by the schema.
TOGETHER: dict[str, Json] = {
    "echo": {},
    "best_of": {"n": 1},
    "length_penalty": {"use_beam_search": True},
    "early_stopping": {"use_beam_search": True},
    "min_tokens": {"max_tokens": 400, "max_output_tokens": 400},
    "messages": {"prompt": None},
    "prompt_token_ids": {"prompt": None, "messages": None},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "tool_choice": {"tools": [TOOL, {**TOOL, "function": {"name": "x"}}]},
    "continue_final_message": {"add_generation_prompt": False},
    "stream_options": {"stream": True},
}


# What this model, or a model at all, cannot do.
OF_THE_MODEL = (
    "is not served; available",
    "this model has no end-of-sequence token",
    "as the model has no encoder",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(tmp_path_factory.mktemp("tokenizer"), max_model_len=512)
    async with running_gateway(executor, max_num_seqs=256) as running:
        yield running


@pytest.mark.cases(3)
@pytest.mark.parametrize("path", BODIES)
async def test_page_offers_only_what_is_accepted(gateway: RunningGateway, path: str) -> None:
    page = (await gateway.http.get("/openapi.json")).json()
    bodies = offered_bodies(page, path, BODIES[path], TOGETHER)
    places = asyncio.Semaphore(16)

    async def refusal(body: Json) -> str:
        async with places:
            answer = await gateway.http.post(path, json=body)
        if answer.status_code == 200 or any(map(answer.text.__contains__, OF_THE_MODEL)):
            return ""
        return f"{body}: {answer.status_code} {answer.text}"

    refused = list(filter(None, await asyncio.gather(*map(refusal, bodies))))
    assert not refused, "\n".join(refused)
