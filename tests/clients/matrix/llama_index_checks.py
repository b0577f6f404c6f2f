"""Checks of LlamaIndex's OpenAILike."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

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


def model(**options: Any) -> OpenAILike:  # noqa: ANN401
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key=API_KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=16384,
        max_retries=0,
        **options,
    )


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def chat() -> None:
    assert model().chat(user(says(TEXT))).message.content == TEXT
    assert model().complete(says(TEXT)).text == TEXT


def stream() -> None:
    pieces = [chunk.delta for chunk in model().stream_chat(user(says(TEXT)))]
    assert len(pieces) > 1
    assert "".join(pieces) == TEXT


async def tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    for streams in (False, True):
        agent = FunctionAgent(
            tools=[tool], llm=model(), system_prompt="Be brief.", streaming=streams
        )
        assert str(await agent.run(ASKS_WEATHER)) == WEATHER_TOLD


def structured() -> None:
    text = call("Weather", **WEATHER.model_dump())
    answer = model().as_structured_llm(Weather).chat(user(says(text)))
    assert answer.raw == WEATHER
    native = model(should_use_structured_outputs=True)
    answer = native.as_structured_llm(Weather).chat(user(says(WEATHER.model_dump_json())))
    assert answer.raw == WEATHER


def error() -> None:
    try:
        model().chat(user(TOO_LONG))
    except openai.BadRequestError as refused:
        assert refused.code == "context_length_exceeded", refused.code
        assert OVERFLOW in refused.message, refused.message
        return
    raise AssertionError("the prompt was not refused")


async def cancel() -> None:
    before = await asyncio.to_thread(num_aborted)
    try:
        async with asyncio.timeout(1.0):
            await model().achat(user(HELD))
    except TimeoutError:
        await asyncio.to_thread(wait_aborted, before)
        return
    raise AssertionError("the answer came")


if __name__ == "__main__":
    run("llama-index-llms-openai-like", chat, stream, tools, structured, error, cancel)
