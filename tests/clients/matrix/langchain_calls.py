"""Calls of LangChain, through both of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, Weather, get_weather, report


def models() -> list[Any]:
    given: dict[str, Any] = {"model": MODEL, "base_url": BASE_URL, "api_key": API_KEY}
    return [
        ChatOpenAI(max_retries=0, use_responses_api=responses, **given)
        for responses in (False, True)
    ]


def tools() -> None:
    weather = tool(get_weather)
    for model in models():
        messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("hi")]
        answer = model.bind_tools([weather]).invoke(messages)
        messages += [answer, *map(weather.invoke, answer.tool_calls)]
        messages += [model.bind_tools([weather]).invoke(messages), HumanMessage("more")]
        list(model.stream(messages))


def structured() -> None:
    for model in models():
        for method in ("json_schema", "function_calling"):
            model.with_structured_output(Weather, method=method).invoke("hi")


def embeddings() -> None:
    given: dict[str, Any] = {"model": MODEL, "base_url": BASE_URL, "api_key": API_KEY}
    OpenAIEmbeddings(check_embedding_ctx_length=False, **given).embed_documents(["t1", "t2"])


if __name__ == "__main__":
    report(tools, structured, embeddings)
