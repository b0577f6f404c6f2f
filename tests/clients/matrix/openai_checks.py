"""Checks of OpenAI's package, with chats and responses."""

from __future__ import annotations

import json

import openai

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    BASE_URL,
    FUNCTION,
    HELD,
    MODEL,
    OVERFLOW,
    TEXT,
    TOO_LONG,
    WEATHER,
    WEATHER_TOLD,
    Weather,
    get_weather,
    num_aborted,
    run,
    says,
    wait_aborted,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)


def chat() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": says(TEXT)}]
    )
    assert answer.choices[0].message.content == TEXT
    response = client.responses.create(model=MODEL, input=says(TEXT))
    assert response.output_text == TEXT


def stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": says(TEXT)}]
    ) as chat_events:
        pieces = [event.delta for event in chat_events if event.type == "content.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == TEXT
    with client.responses.stream(model=MODEL, input=says(TEXT)) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert events.get_final_response().output_text == "".join(pieces) == TEXT


def tools() -> None:
    messages: list[object] = [{"role": "user", "content": ASKS_WEATHER}]
    options = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}
    answer = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    message = answer.choices[0].message
    (called,) = message.tool_calls
    arguments = json.loads(called.function.arguments)
    result = {"role": "tool", "tool_call_id": called.id, "content": get_weather(**arguments)}
    # Everything that the answer has is sent back, null or not.
    messages += [message.model_dump(), result]
    answer = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == WEATHER_TOLD


def tools_of_responses() -> None:
    items: list[object] = [{"role": "user", "content": ASKS_WEATHER}]
    options = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}]}
    answer = client.responses.create(input=items, **options)  # type: ignore[call-overload]
    (called,) = answer.output
    output = get_weather(**json.loads(called.arguments))
    result = {"type": "function_call_output", "call_id": called.call_id, "output": output}
    items += [*answer.output, result]
    answer = client.responses.create(input=items, **options)  # type: ignore[call-overload]
    assert answer.output_text == WEATHER_TOLD


def structured() -> None:
    said = says(WEATHER.model_dump_json())
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": said}], response_format=Weather
    )
    assert answer.choices[0].message.parsed == WEATHER
    response = client.responses.parse(model=MODEL, input=said, text_format=Weather)
    assert response.output_parsed == WEATHER


def error() -> None:
    try:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": TOO_LONG}]
        )
    except openai.BadRequestError as refused:
        assert refused.code == "context_length_exceeded", refused.code
        assert OVERFLOW in refused.message, refused.message
        return
    raise AssertionError("the prompt was not refused")


def cancel() -> None:
    before = num_aborted()
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": HELD}], stream=True
    ) as chunks:
        while not next(chunks).choices[0].delta.content:
            pass
    wait_aborted(before)


if __name__ == "__main__":
    run("openai", chat, stream, tools, tools_of_responses, structured, error, cancel)
