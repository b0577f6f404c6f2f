"""Checks of Anthropic's package."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    FUNCTION,
    HELD,
    MODEL,
    SCHEMA,
    TEXT,
    TOO_LONG,
    URL,
    WEATHER_TOLD,
    get_weather,
    num_aborted,
    run,
    says,
    wait_aborted,
)

client = anthropic.Anthropic(base_url=URL, api_key=API_KEY, max_retries=0)


def options(said: str) -> Any:  # noqa: ANN401
    return {
        "model": MODEL,
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": said}],
    }


def chat() -> None:
    (block,) = client.messages.create(**options(says(TEXT))).content
    assert block.text == TEXT


def stream() -> None:
    with client.messages.stream(**options(says(TEXT))) as events:
        pieces = list(events.text_stream)
    assert len(pieces) > 1
    assert "".join(pieces) == TEXT


def tools() -> None:
    tool = {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": SCHEMA,
        "cache_control": {"type": "ephemeral"},
    }
    asked = {**options(ASKS_WEATHER), "tools": [tool]}
    answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    (called,) = answer.content
    result = {
        "type": "tool_result",
        "tool_use_id": called.id,
        "content": get_weather(**called.input),
    }
    asked["messages"] += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    (block,) = client.messages.create(**asked).content
    assert block.text == WEATHER_TOLD


def error() -> None:
    try:
        client.messages.create(**options(TOO_LONG))
    except anthropic.BadRequestError as refused:
        assert "prompt is too long" in refused.message, refused.message
        return
    raise AssertionError("the prompt was not refused")


def cancel() -> None:
    before = num_aborted()
    with client.messages.stream(**options(HELD)) as events:
        next(iter(events.text_stream))
    wait_aborted(before)


if __name__ == "__main__":
    run("anthropic", chat, stream, tools, error, cancel)
