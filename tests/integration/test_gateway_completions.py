"""`/v1/completions` through a gateway, a scheduler process and a fake executor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from splitserve_client import SamplingParams
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

PATH = "/v1/completions"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path)) as running:
        yield running


async def test_text_is_that_of_the_expected_tokens_when_streamed_and_not(
    gateway: RunningGateway,
) -> None:
    prompt = gateway.tokenizer.encode("the quick fox")
    (expected,) = expected_completions(
        prompt, SamplingParams(seed=5, max_tokens=40), vocab_size=406
    )
    text = gateway.tokenizer.decode([*prompt, *expected.token_ids])
    text = text.removeprefix(gateway.tokenizer.decode(prompt))
    body = {"prompt": "the quick fox", "seed": 5, "max_tokens": 40}
    whole = await gateway.post(PATH, **body)
    events = await gateway.stream(PATH, **body)
    assert whole["choices"][0]["text"] == text
    assert "".join(event["choices"][0]["text"] for event in events) == text
