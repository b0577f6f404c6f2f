"""The official Python package before a real model: its helpers, types and exceptions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.stack import ServedModel
from tests.clients.stories import (
    GREETING,
    HELLO,
    TERSE,
    USER,
    GetTime,
    GetWeather,
    Place,
)


def test_chat_stream_helper_gathers_the_answer(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=[HELLO], temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert "".join(deltas) == final.choices[0].message.content == GREETING


def test_chat_takes_an_answer_back_as_it_came(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(
        model=model, messages=[USER], temperature=0, max_tokens=6
    )
    more: Any = [USER, first.choices[0].message, {"role": "user", "content": "Go on."}]

    second = client.chat.completions.create(model=model, messages=more, max_tokens=3)

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.total_tokens


async def test_async_answers_are_not_mixed_up_when_concurrent(served: ServedModel) -> None:
    animals = ["fox", "owl", "cat", "dog", "bear", "frog", "mouse", "duck"]

    async with AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client:

        async def tell(animal: str) -> str:
            message: Any = {"role": "user", "content": f"Tell me a story about a {animal}."}
            stream = await client.chat.completions.create(
                model=served.model, messages=[message], temperature=0, max_tokens=16, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*map(tell, animals))
        alone = [await tell(animal) for animal in animals]

    assert together == alone
    assert len(set(alone)) > 1


def test_models_are_listed(client: OpenAI, model: str) -> None:
    assert [item.id for item in client.models.list()] == [model]


def test_error_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="nobody", messages=[USER])

    assert raised.value.param == "model"
    assert "nobody" in raised.value.message


@pytest.mark.parametrize("is_stream", [False, True])
def test_error_too_long_prompt_is_a_bad_request(
    client: OpenAI, model: str, is_stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt=[5] * 2100, stream=is_stream)

    assert raised.value.code == "context_length_exceeded"


def test_error_unreachable_server_is_a_connection_error() -> None:
    with (
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


RESPONSES_TOOL: Any = {"type": "function", **openai.pydantic_function_tool(GetWeather)["function"]}

OTHER_TOOL: Any = {"type": "function", **openai.pydantic_function_tool(GetTime)["function"]}


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
    called = client.responses.parse(
        **asked, input="Rain?", tools=[RESPONSES_TOOL], tool_choice="required", **terse
    )
    (call,) = called.output
    assert call.type == "function_call"

    for items in ([*place.output, call], [place.output[0].to_dict(), call.to_dict()]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        more: Any = [*items, result]
        assert client.responses.create(**asked, input=more).output_text


TOOL = openai.pydantic_function_tool(GetWeather)
CALL: Any = {"type": "function", "function": {"name": "GetWeather"}}


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


def test_structured_answer_that_is_cut_off_says_so(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=[USER], response_format=Place, max_tokens=2
        )
