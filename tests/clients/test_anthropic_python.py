"""Anthropic's official Python package before a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.clients.stack import ServedModel
from tests.clients.stories import GREETING, HELLO, STORY, USER, GetWeather

GREEDY: Any = {"extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "GetWeather",
    "description": GetWeather.__doc__,
    "input_schema": {**GetWeather.model_json_schema(), "additionalProperties": False},
    "strict": True,
}


@pytest.fixture
def claude(served: ServedModel) -> Iterator[Anthropic]:
    """The official client, without retries."""
    with Anthropic(base_url=served.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_message_is_what_the_chat_says(claude: Anthropic, model: str) -> None:
    message = claude.messages.create(model=model, max_tokens=100, messages=[HELLO], **GREEDY)
    cut = claude.messages.create(model=model, max_tokens=6, messages=[USER], **GREEDY)

    assert message.to_dict()["content"] == [{"type": "text", "text": GREETING}]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 23)
    assert cut.to_dict()["content"] == [{"type": "text", "text": STORY}]
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 6)


def test_message_stream_helper_gathers_the_answer(claude: Anthropic, model: str) -> None:
    with claude.messages.stream(
        model=model, max_tokens=32000, messages=[HELLO], **GREEDY
    ) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()

    assert "".join(texts) == final.content[0].to_dict()["text"] == GREETING
    assert final.stop_reason == "end_turn"


def test_usage_says_what_was_cached_and_is_as_counted(claude: Anthropic, model: str) -> None:
    story = "Tell me about a fox and a dog, and about a bear that nobody has seen. " * 4
    asked: Any = {"model": model, "messages": [{"role": "user", "content": story}]}

    count = claude.messages.count_tokens(**asked).input_tokens
    first, second = (
        claude.messages.create(max_tokens=1, **asked, **GREEDY).usage for _ in range(2)
    )

    assert second.cache_read_input_tokens
    for usage in (first, second):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count


def test_tool_loop_runs_with_a_forced_call(claude: Anthropic, model: str) -> None:
    asked: Any = {"model": model, "max_tokens": 200, "tools": [TOOL], **GREEDY}
    choice: Any = {"type": "tool", "name": "GetWeather"}
    first = claude.messages.create(messages=[USER], tool_choice=choice, **asked)
    with claude.messages.stream(messages=[USER], tool_choice=choice, **asked) as stream:
        streamed = stream.get_final_message()

    (call,) = first.content
    assert call.type == "tool_use"
    assert (call.input, first.stop_reason) == ({"city": "Oslo"}, "tool_use")
    assert streamed.content[0].to_dict() == {
        **call.to_dict(),
        "id": streamed.content[0].to_dict()["id"],
    }
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    turns: Any = [
        USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(messages=turns, **asked)
    assert second.usage.output_tokens > 0
    counts = [
        claude.messages.count_tokens(model=model, messages=turns[:end], tools=[TOOL]).input_tokens
        for end in (1, 2, 3)
    ]
    assert counts == sorted(set(counts))


def test_error_unknown_model_is_not_found(claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.messages.create(model="nobody", max_tokens=1, messages=[USER])

    assert raised.value.type == "not_found_error"
    assert "nobody" in raised.value.message
    assert raised.value.request_id


@pytest.mark.parametrize("is_stream", [False, True])
def test_error_too_long_prompt_is_a_bad_request(
    claude: Anthropic, model: str, is_stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as raised:
        claude.messages.create(
            model=model,
            max_tokens=1,
            messages=[{"role": "user", "content": "fox " * 2100}],
            stream=is_stream,
        )

    assert raised.value.error_code == "context_length_exceeded"
