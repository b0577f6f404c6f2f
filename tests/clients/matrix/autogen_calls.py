"""Calls of AutoGen."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, Weather, get_weather, report

ABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


def client() -> Any:  # noqa: ANN401
    given: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": API_KEY}
    return OpenAIChatCompletionClient(model_info=ABILITIES, **given)


async def tools() -> None:
    agent = AssistantAgent("a", client(), tools=[get_weather], reflect_on_tool_use=True)
    await agent.run(task="hi")


async def structured() -> None:
    await AssistantAgent("a", client(), output_content_type=Weather).run(task="hi")


if __name__ == "__main__":
    report(tools, structured)
