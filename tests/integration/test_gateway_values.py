"""Odd values of every field get 200 or 400, and leave no blocks allocated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from executor_service.steps import DefaultSampling
from splitserve_client import SamplingParams
from splitserve_gateway.schemas import ChatRequest, CompletionRequest
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
_MANY = 32

VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "\x00", "x" * 2000, [], [0], [-1],
    [""], ["x"], [None], [[]], [{}], {}, {"0": 1}, {"x": {"y": []}}, [{"role": "assistant"}],
    [{"role": "user", "content": ""}], [{"type": "function"}],
]  # fmt: skip
OF_CHATS = list(ChatRequest.model_fields)
OF_COMPLETIONS = [*(CompletionRequest.model_fields.keys() - OF_CHATS), "echo"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(
        tmp_path_factory.mktemp("files"),
        eos_token_ids=(1,),
        default_sampling=DefaultSampling(temperature=0.0),
    )
    async with running_gateway(executor) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "plain"),
    [
        ("/v1/completions", OF_COMPLETIONS, {"prompt": "a"}),
        ("/v1/chat/completions", OF_CHATS, {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_request_is_answered_or_refused_whatever_a_field_has(
    gateway: RunningGateway,
    path: str,
    fields: list[str],
    plain: dict[str, Any],
) -> None:
    limit = asyncio.Semaphore(_MANY)

    async def send(field: str, value: object) -> None:
        body = {**plain, "max_tokens": 2, field: value}
        if field in ("prompt_token_ids", "messages", "prompt"):
            body = {"max_tokens": 2, field: value}
        async with limit:
            response = await gateway.http.post(path, json=body)
        told = f"{field}={json.dumps(value)[:80]}: {response.status_code} {response.text[:300]}"
        assert response.status_code in (200, 400, 404 if field == "model" else 400), told
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error", told
            assert error["message"], told

    await asyncio.gather(*(send(field, value) for field in fields for value in VALUES))
    await gateway.service.wait_idle()


async def test_model_recommendation_holds_where_the_request_says_nothing(
    gateway: RunningGateway,
) -> None:
    prompt = gateway.tokenizer.encode("the fox")
    for temperature in (None, 1.0):
        params = SamplingParams(seed=4, max_tokens=9, temperature=temperature or 0)
        (expected,) = expected_completions(prompt, params, vocab_size=406)
        answer = await gateway.post(
            "/v1/completions",
            prompt="the fox",
            seed=4,
            max_tokens=9,
            ignore_eos=True,
            temperature=temperature,
            return_token_ids=True,
        )
        assert tuple(answer["choices"][0]["token_ids"]) == expected.token_ids


async def test_request_is_refused_when_its_own_constraints_leave_no_token(
    gateway: RunningGateway,
) -> None:
    body = {
        "prompt": "the",
        "allowed_token_ids": gateway.tokenizer.encode(" fox"),
        "bad_words": ["fox fox"],
        "max_tokens": 5,
    }
    error = await gateway.refusal("/v1/completions", body)
    assert error["code"] == "invalid_logits"
