"""Checks of LiteLLM's package, with OpenAI's and Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    BASE_URL,
    FUNCTION,
    HELD,
    MODEL,
    TEXT,
    TOO_LONG,
    URL,
    WEATHER,
    WEATHER_TOLD,
    Weather,
    get_weather,
    num_aborted,
    run,
    says,
    wait_aborted,
)

OPENAI: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": API_KEY,
    "num_retries": 0,
    "max_retries": 0,
}
ANTHROPIC: dict[str, Any] = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}
APIS = (OPENAI, ANTHROPIC)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat() -> None:
    for api in APIS:
        answer = litellm.completion(messages=user(says(TEXT)), **api)
        assert answer.choices[0].message.content == TEXT
    answer = litellm.responses(input=says(TEXT), **OPENAI)
    assert answer.output[0].content[0].text == TEXT


def stream() -> None:
    for api in APIS:
        chunks = list(litellm.completion(messages=user(says(TEXT)), stream=True, **api))
        assert len(chunks) > 1
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == TEXT


def tools() -> None:
    for api in APIS:
        for is_stream in (False, True):
            _tools(api, is_stream=is_stream)


def _tools(api: dict[str, Any], *, is_stream: bool) -> None:
    cached = {"type": "text", "text": ASKS_WEATHER, "cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [cached]}]
    options = {**api, "tools": [{"type": "function", "function": FUNCTION}]}
    answer = litellm.completion(messages=messages, stream=is_stream, **options)
    if is_stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    (called,) = message.tool_calls
    result = get_weather(**json.loads(called.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": called.id, "content": result}]
    answer = litellm.completion(messages=messages, **options)
    assert answer.choices[0].message.content == WEATHER_TOLD


def structured() -> None:
    said = user(says(WEATHER.model_dump_json()))
    answer = litellm.completion(messages=said, response_format=Weather, **OPENAI)
    assert Weather.model_validate_json(answer.choices[0].message.content) == WEATHER


def error() -> None:
    for api in APIS:
        try:
            litellm.completion(messages=user(TOO_LONG), **api)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError("the prompt was not refused")


async def cancel() -> None:
    before = await asyncio.to_thread(num_aborted)
    task = asyncio.create_task(litellm.acompletion(messages=user(HELD), timeout=1.0, **OPENAI))
    try:
        await task
    except litellm.Timeout:
        await asyncio.to_thread(wait_aborted, before)
        return
    raise AssertionError("the answer came")


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    run("litellm", chat, stream, tools, structured, error, cancel)
