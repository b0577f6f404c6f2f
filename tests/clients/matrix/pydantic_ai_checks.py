"""Checks of Pydantic AI, with OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    BASE_URL,
    HELD,
    MODEL,
    OVERFLOW,
    TEXT,
    TOO_LONG,
    URL,
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


def agents(**options: Any) -> list[Any]:  # noqa: ANN401
    """An agent for each API, Anthropic's last."""
    openai = OpenAIProvider(base_url=BASE_URL, api_key=API_KEY)
    anthropic = AnthropicProvider(base_url=URL, api_key=API_KEY)
    models = [
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=anthropic),
    ]
    return [Agent(model, instructions="Be brief.", **options) for model in models]


async def chat() -> None:
    for agent in agents():
        first = await agent.run(says(TEXT))
        assert first.output == TEXT
        again = await agent.run(says("Again."), message_history=first.all_messages())
        assert again.output == "Again."


async def stream() -> None:
    for agent in agents():
        async with agent.run_stream(says(TEXT)) as answer:
            pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 1
        assert "".join(pieces) == TEXT


async def tools() -> None:
    for agent in agents(tools=[get_weather]):
        assert (await agent.run(ASKS_WEATHER)).output == WEATHER_TOLD


async def structured() -> None:
    said = WEATHER.model_dump_json()
    forms = [
        (Weather, call("final_result", **WEATHER.model_dump())),
        (PromptedOutput(Weather), said),
        (NativeOutput(Weather), said),
    ]
    for form, text in forms:
        *openai, anthropic = agents(output_type=form)
        # It knows no native output of a model with an unknown name.
        for agent in openai if isinstance(form, NativeOutput) else (*openai, anthropic):
            assert (await agent.run(says(text))).output == WEATHER


async def error() -> None:
    for agent in agents():
        try:
            await agent.run(TOO_LONG)
        except ModelHTTPError as refused:
            assert refused.status_code == 400
            assert OVERFLOW in str(refused), refused
            continue
        raise AssertionError("the prompt was not refused")


async def cancel() -> None:
    for agent in agents():
        before = await asyncio.to_thread(num_aborted)
        try:
            async with asyncio.timeout(1.0):
                await agent.run(HELD)
        except TimeoutError:
            await asyncio.to_thread(wait_aborted, before)
            continue
        raise AssertionError("the answer came")


if __name__ == "__main__":
    run("pydantic-ai-slim", chat, stream, tools, structured, error, cancel)
