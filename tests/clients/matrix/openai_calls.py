"""Calls of OpenAI's client, whose answers are sent back as its objects and as its dumps."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.clients.matrix.checks import API_KEY, BASE_URL, FUNCTION, MODEL, Weather, report

CLIENT = OpenAI(base_url=BASE_URL or None, api_key=API_KEY, max_retries=0)
USER: Any = {"role": "user", "content": "hi"}


def tools() -> None:
    given: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    messages: list[Any] = [USER]
    for _ in range(2):
        answer = CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=given)
        message = answer.choices[0].message
        messages += [message, message.model_dump()]
        for call in message.tool_calls or ():
            del messages[-1]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    CLIENT.chat.completions.create(model=MODEL, messages=[*messages, USER])


def structured() -> None:
    CLIENT.chat.completions.parse(model=MODEL, messages=[USER], response_format=Weather)


def response_tools() -> None:
    given: Any = [{"type": "function", **FUNCTION}]
    items: list[Any] = [USER]
    answer = CLIENT.responses.create(model=MODEL, input=items, tools=given, truncation="auto")
    items += answer.output
    for item in answer.output:
        if item.type == "function_call":
            result = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            items.append(result)
    answer = CLIENT.responses.create(model=MODEL, input=items, tools=given)
    items += [*(item.model_dump() for item in answer.output), USER]
    CLIENT.responses.create(model=MODEL, input=items)


def response_structured() -> None:
    CLIENT.responses.parse(model=MODEL, input="hi", text_format=Weather, text={"verbosity": "low"})


def embeddings() -> None:
    CLIENT.embeddings.create(model=MODEL, input=["t1", "t2"])


if __name__ == "__main__":
    report(tools, structured, response_tools, response_structured, embeddings)
