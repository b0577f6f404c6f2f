"""A model without a tokenizer behind a gateway: token ids only."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from splitserve_client import AsyncClient, Prompt, SamplingParams, TokenizerUnavailable
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB_SIZE = 160
PROMPT = [5, 6, 7, 8]
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    executor = FakeExecutor(vocab_size=VOCAB_SIZE, num_device_blocks=1024, max_model_len=1024)
    async with running_gateway(executor) as running:
        yield running


def tokens_after(prompt: list[int], **params: Any) -> list[list[int]]:  # noqa: ANN401
    completions = expected_completions(prompt, SamplingParams(**params), vocab_size=VOCAB_SIZE)
    return [list(completion.token_ids) for completion in completions]


async def test_tokens_are_answered_when_prompts_are_token_ids(gateway: RunningGateway) -> None:
    answer = await gateway.post(COMPLETIONS, prompt=PROMPT, seed=5, max_tokens=9, n=2)

    choices = answer["choices"]
    assert [c["token_ids"] for c in choices] == tokens_after(PROMPT, seed=5, max_tokens=9, n=2)
    assert [c["prompt_token_ids"] for c in choices] == [PROMPT, PROMPT]
    assert [c["text"] for c in choices] == ["", ""]
    assert answer["usage"]["completion_tokens"] == 18


async def test_tokens_are_streamed_when_several_prompts_are_token_ids(
    gateway: RunningGateway,
) -> None:
    prompts = [PROMPT, [9, 9]]
    events = await gateway.stream(COMPLETIONS, prompt=prompts, seed=5, max_tokens=7)

    streamed: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", ())
    expected = [tokens_after(prompt, seed=5, max_tokens=7)[0] for prompt in prompts]
    assert [streamed[0], streamed[1]] == expected


async def test_logprobs_name_token_ids_without_a_tokenizer(
    gateway: RunningGateway,
) -> None:
    body = {"prompt_token_ids": PROMPT, "max_tokens": 3, "seed": 1, "logprobs": 2, "echo": True}
    (choice,) = (await gateway.post(COMPLETIONS, **body))["choices"]

    tokens = [*PROMPT, *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    assert choice["logprobs"]["text_offset"] == [0] * len(tokens)
    assert choice["text"] == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": ["hello", "you"]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"prompt_token_ids": PROMPT}),
        ("/v1/responses", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": PROMPT}),
    ],
)
async def test_what_lacks_is_said_when_a_request_has_text(
    path: str, body: dict[str, object], gateway: RunningGateway
) -> None:
    error = await gateway.refusal(path, body)

    assert error["code"] == "tokenizer_unavailable"
    assert "is served without a tokenizer" in error["message"]
    assert "their checkpoint has no readable tokenizer" in error["message"]
    assert "POST /v1/completions with a prompt of token ids" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "x"),
        ("stop", ["5", "6"]),
        ("bad_words", ["x"]),
        ("guided_regex", "a+"),
        ("response_format", {"type": "json_object"}),
    ],
)
async def test_field_is_refused_when_it_needs_a_tokenizer(
    field: str, value: object, gateway: RunningGateway
) -> None:
    error = await gateway.refusal(COMPLETIONS, {"prompt": PROMPT, field: value})

    assert (error["param"], error["code"]) == (field, "tokenizer_unavailable")


async def test_refusal_says_why_a_tokenizer_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "none"}))
    files = {"tokenizer.json": tmp_path / "tokenizer.json"}
    executor = FakeExecutor(vocab_size=VOCAB_SIZE, num_device_blocks=64, tokenizer_files=files)
    async with running_gateway(executor) as running:
        answer = await running.post(COMPLETIONS, prompt=PROMPT, max_tokens=2)
        error = await running.refusal(COMPLETIONS, {"prompt": "hello"})

    assert len(answer["choices"][0]["token_ids"]) == 2
    assert "tokenizer.json is not readable" in error["message"]


async def test_library_answers_numbers_when_a_prompt_is_token_ids(
    gateway: RunningGateway,
) -> None:
    (expected,) = tokens_after(PROMPT, seed=5, max_tokens=6)
    prompt, params = Prompt(token_ids=tuple(PROMPT)), SamplingParams(seed=5, max_tokens=6)
    async with AsyncClient(gateway.service.scheduler.address) as client:
        generation = await client.complete_text(prompt, params)
        with pytest.raises(TokenizerUnavailable):
            await client.complete_text("hello", params)
        with pytest.raises(TokenizerUnavailable):
            await client.complete_text(prompt, params, stop_strings=["5"])

    assert list(generation.completions[0].token_ids) == expected
    assert generation.text == " ".join(map(str, expected))
