"""`/v1/chat/completions` through a gateway, a scheduler process and a fake executor."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from splitserve_client import SamplingParams
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox?"}]
RENDERED = "<s>[system]be brief\n[user]the fox?\n[assistant]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path_factory.mktemp("files"))) as running:
        yield running


def expected_texts(gateway: RunningGateway, params: SamplingParams) -> list[str]:
    prompt = gateway.tokenizer.encode(RENDERED, add_special_tokens=False)
    completions = expected_completions(prompt, params, vocab_size=406)
    return [gateway.tokenizer.decode(completion.token_ids) for completion in completions]


async def test_chat_is_the_template_and_the_expected_tokens_when_streamed_and_not(
    gateway: RunningGateway,
) -> None:
    texts = expected_texts(gateway, SamplingParams(seed=5, max_tokens=40, n=2))
    body = {"messages": MESSAGES, "seed": 5, "max_tokens": 40, "n": 2}
    whole = await gateway.post(PATH, **body)
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    events = await gateway.stream(PATH, **body)
    streamed = ["", ""]
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
