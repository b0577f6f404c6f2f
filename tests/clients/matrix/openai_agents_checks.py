"""Checks of OpenAI's Agents SDK, through both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
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

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    BASE_URL,
    HELD,
    MODEL,
    OVERFLOW,
    TEXT,
    TOO_LONG,
    WEATHER,
    WEATHER_TOLD,
    Weather,
    call,
    get_weather,
    num_aborted,
    run,
    says,
    wait_aborted,
)

TOOL = function_tool(get_weather)


def agents(**options: Any) -> list[Any]:  # noqa: ANN401
    """An agent for each API."""
    return [
        Agent(
            name="teller",
            instructions="Be brief.",
            model=api(MODEL, AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)),
            **options,
        )
        for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    ]


async def chat() -> None:
    for agent in agents(model_settings=ModelSettings(truncation="auto", verbosity="low")):
        first = await Runner.run(agent, says(TEXT))
        assert first.final_output == TEXT
        turns = [*first.to_input_list(), {"role": "user", "content": says("Again.")}]
        assert (await Runner.run(agent, turns)).final_output == "Again."


async def stream() -> None:
    for agent in agents():
        answer = Runner.run_streamed(agent, says(TEXT))
        raw = [e.data async for e in answer.stream_events() if e.type == "raw_response_event"]
        pieces = [event.delta for event in raw if event.type == "response.output_text.delta"]
        assert len(pieces) > 1
        assert answer.final_output == "".join(pieces) == TEXT


async def tools() -> None:
    for agent in agents(tools=[TOOL]):
        assert (await Runner.run(agent, ASKS_WEATHER)).final_output == WEATHER_TOLD
        streamed = Runner.run_streamed(agent, ASKS_WEATHER)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == WEATHER_TOLD


async def handoff() -> None:
    for first, second in zip(agents(), agents(), strict=True):
        second.name = "other"
        first.handoffs = [second]
        said = says(call("transfer_to_other"), "It is the other.")
        answer = await Runner.run(first, said)
        assert answer.last_agent.name == "other"
        assert answer.final_output == "It is the other."


async def structured() -> None:
    for agent in agents(output_type=Weather):
        answer = await Runner.run(agent, says(WEATHER.model_dump_json()))
        assert answer.final_output == WEATHER


async def error() -> None:
    for agent in agents():
        try:
            await Runner.run(agent, TOO_LONG)
        except openai.BadRequestError as refused:
            assert refused.code == "context_length_exceeded", refused.code
            assert OVERFLOW in refused.message, refused.message
            continue
        raise AssertionError("the prompt was not refused")


async def cancel() -> None:
    for agent in agents():
        before = await asyncio.to_thread(num_aborted)
        try:
            async with asyncio.timeout(1.0):
                await Runner.run(agent, HELD)
        except TimeoutError:
            await asyncio.to_thread(wait_aborted, before)
            continue
        raise AssertionError("the answer came")


if __name__ == "__main__":
    set_tracing_disabled(True)
    run("openai-agents", chat, stream, tools, handoff, structured, error, cancel)
