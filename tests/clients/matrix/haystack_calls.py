"""Calls of Haystack."""

from __future__ import annotations

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, get_weather, report


def tools() -> None:
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token(API_KEY),
        model=MODEL,
        api_base_url=BASE_URL,
        tools=[create_tool_from_function(get_weather)],
    )
    messages = [ChatMessage.from_user("hi")]
    answer = generator.run(messages)["replies"][0]
    results = [ChatMessage.from_tool("rain", origin=call) for call in answer.tool_calls]
    generator.run([*messages, answer, *results])


if __name__ == "__main__":
    report(tools)
