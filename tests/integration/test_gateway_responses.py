"""The Responses API with the official client and a fake executor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from splitserve_client import SamplingParams
from splitserve_gateway.endpoints import responses
from splitserve_gateway.generation import ChoiceEnd, Delta, Event, TextRequest, Totals
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXTRA: dict[str, Any] = {"extra_body": {"seed": 5}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path_factory.mktemp("files"))) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
    ) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(client: openai.AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id


def expected_text(gateway: RunningGateway, rendered: str, max_tokens: int) -> str:
    prompt = gateway.tokenizer.encode(rendered, add_special_tokens=False)
    params = SamplingParams(seed=5, max_tokens=max_tokens)
    (completion,) = expected_completions(prompt, params, vocab_size=406)
    return gateway.tokenizer.decode(completion.token_ids)


async def test_response_is_the_chat_of_its_input_and_instructions(
    gateway: RunningGateway, client: openai.AsyncOpenAI, model: str
) -> None:
    expected = expected_text(gateway, "<s>[system]be brief\n[user]the fox?\n[assistant]", 30)

    response = await client.responses.create(
        model=model, instructions="be brief", input="the fox?", max_output_tokens=30, **EXTRA
    )

    assert response.output_text == expected
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 30
    assert response.usage.total_tokens == response.usage.input_tokens + 30


async def test_response_continues_items_of_an_earlier_one(
    gateway: RunningGateway, client: openai.AsyncOpenAI, model: str
) -> None:
    first = await client.responses.create(
        model=model, input="the fox?", max_output_tokens=5, **EXTRA
    )
    items: Any = [
        {"role": "user", "content": "the fox?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": [{"type": "input_text", "text": "and then?"}]},
    ]
    rendered = f"<s>[user]the fox?\n[assistant]{first.output_text}\n[user]and then?\n[assistant]"

    second = await client.responses.create(model=model, input=items, max_output_tokens=20, **EXTRA)

    assert second.output_text == expected_text(gateway, rendered, 20)


async def test_response_events_add_up_to_the_whole_when_streamed(
    client: openai.AsyncOpenAI, model: str
) -> None:
    asked: Any = {"model": model, "input": "the fox?", "max_output_tokens": 25, **EXTRA}
    whole = await client.responses.create(**asked)

    events = [event async for event in await client.responses.create(**asked, stream=True)]

    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event.delta for event in events[4:-4])
    assert text == events[-4].text == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.output[0].id == events[2].item.id
    # The second request finds what the first left in the prefix cache.
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert last.usage.output_tokens == whole.usage.output_tokens == 25


async def test_response_says_so_when_an_operator_ended_it(
    client: openai.AsyncOpenAI, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(_request: TextRequest) -> AsyncIterator[Event]:
        yield Delta(0, "Once", (1,), end=ChoiceEnd("abort"))
        yield Totals(3, 1)

    monkeypatch.setattr(responses, "stream_choices", ended)
    whole = await client.responses.create(model=model, input="the fox?")
    events = [event async for event in await client.responses.create(input="a", stream=True)]

    assert (whole.status, whole.output_text) == ("incomplete", "Once")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.to_dict() == {"reason": "abort"}
    assert events[-1].type == "response.incomplete"
