"""The official Python package: tools and structured output, before a real model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.stories import (
    STORY,
    TERSE,
    USER,
    GetTime,
    GetWeather,
    Place,
)

TOOL = openai.pydantic_function_tool(GetWeather)
CALL: Any = {"type": "function", "function": {"name": "GetWeather"}}

BOTH = [openai.pydantic_function_tool(GetTime), TOOL]


@pytest.mark.parametrize("tool_choice", ["required", CALL], ids=["required", "named"])
def test_tool_call_has_arguments_of_the_schema(
    client: OpenAI,
    model: str,
    tool_choice: Any,  # noqa: ANN401
) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=[USER],
        tools=[TOOL],
        tool_choice=tool_choice,
        max_tokens=150,
        **TERSE,
    )

    (call,) = answer.choices[0].message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "GetWeather")
    assert call.function.parsed_arguments == GetWeather(city="Oslo")


def test_tool_streamed_call_is_the_whole_one(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=[USER],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=150,
        **TERSE,
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()

    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    assert json.loads(done.arguments) == {"city": "Oslo"}
    (call,) = final.choices[0].message.tool_calls or []
    assert call.id
    assert call.function.parsed_arguments == GetWeather(city="Oslo")
    assert final.choices[0].finish_reason == "tool_calls"


def test_tool_result_of_a_call_goes_back(client: OpenAI, model: str) -> None:
    asked = client.chat.completions.create(
        model=model,
        messages=[USER],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=150,
        **TERSE,
    )
    (call,) = asked.choices[0].message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    more: Any = [USER, asked.choices[0].message, result]

    answer = client.chat.completions.create(
        model=model, messages=more, tools=[TOOL], temperature=0, max_tokens=6
    )

    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_tool_call_is_of_an_allowed_tool_and_the_prompt_has_all(client: OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": [USER], "tools": BOTH, **TERSE}
    free = client.chat.completions.create(**asked, max_tokens=6)

    for mode in ("required", "auto"):
        allowed: Any = {"mode": mode, "tools": [CALL]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        answer = client.chat.completions.create(**asked, tool_choice=choice, max_tokens=150)

        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls] == ["GetWeather"] * (mode == "required")
        assert answer.usage is not None
        assert free.usage is not None
        assert answer.usage.prompt_tokens == free.usage.prompt_tokens


def test_tool_text_is_no_call(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[USER], tools=[TOOL], temperature=0, max_tokens=6
    )

    assert answer.choices[0].message.content == STORY
    assert answer.choices[0].message.tool_calls is None


def test_structured_answer_is_parsed(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=[USER], response_format=Place, max_tokens=80, **TERSE
    )

    assert answer.choices[0].message.parsed == Place(city="Oslo")
    assert answer.choices[0].finish_reason == "stop"


# The client warns of its own types.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_structured_answers_go_back_as_they_were_parsed(client: OpenAI, model: str) -> None:
    asked: Any = {"model": model, "tools": [TOOL], "max_tokens": 150, **TERSE}
    place = client.chat.completions.parse(**asked, messages=[USER], response_format=Place)
    called = client.chat.completions.parse(**asked, messages=[USER], tool_choice="required")
    call = called.choices[0].message
    assert call.tool_calls
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "rain"}

    for message in (call, call.model_dump()):
        more: Any = [USER, place.choices[0].message, USER, message, result]
        answer = client.chat.completions.create(**{**asked, "max_tokens": 6}, messages=more)
        assert answer.choices[0].message.content


def test_structured_streamed_answer_is_parsed(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=[USER], response_format=Place, max_tokens=80, **TERSE
    ) as stream:
        final = stream.get_final_completion()

    assert final.choices[0].message.parsed == Place(city="Oslo")


def test_structured_json_object_is_one(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[USER],
        response_format={"type": "json_object"},
        max_tokens=200,
        logit_bias={"2": 1},
        **TERSE,
    )

    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


def test_structured_answer_that_is_cut_off_says_so(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=[USER], response_format=Place, max_tokens=2
        )
