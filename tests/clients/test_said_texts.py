"""Tool calls and reasoning of a model that says any text, through the whole stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.clients.said_texts import Speaker
from tests.clients.stack import CHAT_TEMPLATE, MODEL, served

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"value": {}}},
        },
    }
    for name in ("look_up", "store")
]
ARGUMENTS = [
    {"value": {"deep": [1, {"er": None}], "quote": 'he said "no" \\ {'}},
    {"value": "é → 漢字 </tool_call> <tool_call>"},
]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    return Speaker(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def client(speaker: Speaker) -> Iterator[OpenAI]:
    with (
        served(speaker.folder) as running,
        OpenAI(base_url=f"{running.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_text_is_said_when_it_is_far_back(client: OpenAI, speaker: Speaker) -> None:
    text = "Anything: naïve, 漢字, {braces} and <angles>."
    answer = client.chat.completions.create(model=MODEL, messages=speaker.messages(text))  # type: ignore[arg-type]
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"


def test_calls_are_said_when_their_arguments_have_markers(client: OpenAI, speaker: Speaker) -> None:
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in zip(("look_up", "store"), ARGUMENTS, strict=True)
    ]
    text = "I look. " + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    asked: Any = {"model": MODEL, "messages": speaker.messages(text, TOOLS), "tools": TOOLS}

    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        arguments = [
            event for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        streamed = stream.get_final_completion().choices[0]

    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content or "").strip() == "I look."
        found = choice.message.tool_calls or []
        assert [call.function.name for call in found] == ["look_up", "store"]
        assert [json.loads(call.function.arguments) for call in found] == ARGUMENTS
    assert len(arguments) > 10
