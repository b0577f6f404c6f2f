"""Checks of LangChain's ChatOpenAI, with chats and responses."""

from __future__ import annotations

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    BASE_URL,
    HELD,
    MODEL,
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

TOOL = tool(get_weather)


def models() -> list[ChatOpenAI]:
    """A model for each API."""
    return [
        ChatOpenAI(
            base_url=BASE_URL,
            api_key=API_KEY,
            model=MODEL,
            max_retries=0,
            use_responses_api=uses_responses,
        )
        for uses_responses in (False, True)
    ]


def chat() -> None:
    for model in models():
        assert model.invoke(says(TEXT)).text == TEXT


def stream() -> None:
    for model in models():
        pieces = [chunk.text for chunk in model.stream(says(TEXT))]
        assert len(pieces) > 1
        assert "".join(pieces) == TEXT


def tools() -> None:
    for model in models():
        bound = model.bind_tools([TOOL])
        asked = HumanMessage(ASKS_WEATHER)
        answer = bound.invoke([asked])
        (called,) = answer.tool_calls
        result = ToolMessage(TOOL.invoke(called["args"]), tool_call_id=called["id"])
        assert bound.invoke([asked, answer, result]).text == WEATHER_TOLD


def structured() -> None:
    said = {
        "json_schema": WEATHER.model_dump_json(),
        "json_mode": WEATHER.model_dump_json(),
        "function_calling": call("Weather", **WEATHER.model_dump()),
    }
    for model in models():
        for method, text in said.items():
            form = model.with_structured_output(Weather, method=method)
            assert form.invoke(says(text)) == WEATHER, method


def error() -> None:
    for model in models():
        try:
            model.invoke(TOO_LONG)
        except ContextOverflowError:
            continue
        raise AssertionError("the prompt was not refused")


def cancel() -> None:
    for model in models():
        before = num_aborted()
        chunks = model.stream(HELD)
        while not next(chunks).text:
            pass
        chunks.close()
        wait_aborted(before)


if __name__ == "__main__":
    run("langchain-openai", chat, stream, tools, structured, error, cancel)
