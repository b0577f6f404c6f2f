"""The official Python package: responses, before a real model."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai import OpenAI

from tests.clients.stories import (
    GREETING,
    HELLO,
    USER,
    GetTime,
    GetWeather,
    Place,
)

RESPONSES_TOOL: Any = {"type": "function", **openai.pydantic_function_tool(GetWeather)["function"]}

OTHER_TOOL: Any = {"type": "function", **openai.pydantic_function_tool(GetTime)["function"]}


def test_response_answer_is_whole(client: OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="Hello!", temperature=0)

    assert (answer.output_text, answer.status) == (GREETING, "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 23
    assert answer.usage.input_tokens + 23 == answer.usage.total_tokens


def test_response_answer_that_is_cut_off_is_incomplete(client: OpenAI, model: str) -> None:
    answer = client.responses.create(
        model=model, input="Hello!", temperature=0, max_output_tokens=2
    )

    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_response_stream_helper_gathers_the_answer(client: OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Hello!", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()

    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == GREETING
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))


def test_response_answer_is_parsed(client: OpenAI, model: str) -> None:
    answer = client.responses.parse(
        model=model,
        input="Where?",
        text_format=Place,
        temperature=0,
        max_output_tokens=80,
        extra_body={"frequency_penalty": 2},
    )

    assert answer.output_parsed == Place(city="Oslo")


def test_response_tool_is_called_and_its_result_goes_back(client: OpenAI, model: str) -> None:
    asked = client.responses.create(
        model=model,
        input="The weather?",
        tools=[RESPONSES_TOOL],
        tool_choice="required",
        temperature=0,
        max_output_tokens=150,
        extra_body={"frequency_penalty": 2},
    )
    (call,) = asked.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("GetWeather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more: Any = [{"role": "user", "content": "The weather?"}, call, result]

    answer = client.responses.create(
        model=model, input=more, tools=[RESPONSES_TOOL], temperature=0, max_output_tokens=6
    )

    assert answer.output_text


def test_response_conversation_is_a_list(client: OpenAI, model: str) -> None:
    first = client.responses.create(
        model=model, input="Hello!", instructions="You tell stories.", temperature=0
    )
    more: Any = [HELLO, *first.output, USER]

    second = client.responses.create(model=model, input=more, temperature=0, max_output_tokens=6)

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.output_text


def test_response_call_is_of_an_allowed_tool(client: OpenAI, model: str) -> None:
    named: Any = {"type": "function", "name": "GetWeather"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    answer = client.responses.create(
        model=model,
        input="How is the weather?",
        tools=[OTHER_TOOL, RESPONSES_TOOL],
        tool_choice=choice,
        temperature=0,
        max_output_tokens=150,
        extra_body={"frequency_penalty": 2},
    )

    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name == "GetWeather"
    assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    assert len(answer.tools) == 2


def test_response_items_go_back_as_they_were_parsed(client: OpenAI, model: str) -> None:
    asked: Any = {"model": model, "temperature": 0, "max_output_tokens": 80}
    terse: Any = {"extra_body": {"frequency_penalty": 2}}
    place = client.responses.parse(**asked, input="Where?", text_format=Place, **terse)
    tools: Any = [openai.pydantic_function_tool(GetWeather)["function"]]
    tools = [{"type": "function", **tools[0]}]
    called = client.responses.parse(
        **asked, input="Rain?", tools=tools, tool_choice="required", **terse
    )
    (call,) = called.output
    assert call.type == "function_call"

    for items in ([*place.output, call], [place.output[0].to_dict(), call.to_dict()]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        more: Any = [*items, result]
        assert client.responses.create(**asked, input=more).output_text
