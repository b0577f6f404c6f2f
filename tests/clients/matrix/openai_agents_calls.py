"""Calls of OpenAI's Agents SDK, through both of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, Weather, get_weather, report

TOOL = function_tool(get_weather)


def agents(**options: Any) -> list[Any]:  # noqa: ANN401
    """An agent for each API."""
    return [
        Agent(
            name="a",
            instructions="Be brief.",
            model=api(MODEL, AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)),
            **options,
        )
        for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    ]


async def tools() -> None:
    for agent in agents(tools=[TOOL], output_type=Weather):
        await Runner.run(agent, "hi")


async def settings() -> None:
    chosen = ModelSettings(
        truncation="auto",
        verbosity="low",
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
    )
    for agent in agents(model_settings=chosen):
        await Runner.run(agent, "hi")


async def streamed() -> None:
    for agent in agents(tools=[TOOL]):
        answer = Runner.run_streamed(agent, "hi")
        async for _ in answer.stream_events():
            pass


if __name__ == "__main__":
    set_tracing_disabled(True)
    report(tools, settings, streamed)
