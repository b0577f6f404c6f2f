"""What LangChain's ChatOpenAI gets from a gateway, as JSON: run by `test_other_clients.py`.

`python langchain_calls.py BASE_URL MODEL`, with the Python that has LangChain.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

STORY = [SystemMessage("You tell stories."), HumanMessage("Tell me a story about a fox.")]


@tool
def get_weather(city: Literal["Oslo"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Answer(BaseModel):
    """Where it is."""

    city: Literal["Oslo"]


class Calls:
    """One method for each call; what it returns is compared by the test."""

    def __init__(self, base_url: str, model: str) -> None:
        options: dict[str, Any] = {"base_url": f"{base_url}/v1", "api_key": "none", "model": model}
        self.model = ChatOpenAI(**options, temperature=0, max_tokens=8, max_retries=0)
        # Against white space without end.
        self.terse = ChatOpenAI(
            **options, temperature=0, max_tokens=120, frequency_penalty=2, max_retries=0
        )
        self.responding = ChatOpenAI(
            **options, temperature=0, max_tokens=8, use_responses_api=True, max_retries=0
        )
        self.completion = OpenAI(**options, temperature=0, max_tokens=6, max_retries=0)

    def invoke(self) -> object:
        message = self.model.invoke(STORY)
        return _told(message)

    def stream(self) -> object:
        chunks = list(self.model.stream(STORY, stream_usage=True))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        return _told(whole)

    def logprobs(self) -> object:
        message = self.model.bind(logprobs=True, top_logprobs=2).invoke(STORY)
        return [item["token"] for item in message.response_metadata["logprobs"]["content"]]

    def stop(self) -> object:
        return self.model.bind(stop=["time"]).invoke(STORY).content

    def complete(self) -> object:
        return self.completion.invoke("Once upon a time")

    def tools_streamed(self) -> object:
        bound = self.terse.bind_tools([get_weather], tool_choice="any", strict=True)
        chunks = list(bound.stream(STORY))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        return [[call["name"], call["args"]] for call in whole.tool_calls]

    def tools_answered(self) -> object:
        bound = self.terse.bind_tools([get_weather], tool_choice="any", strict=True)
        asked = bound.invoke(STORY)
        results = [
            ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
            for call in asked.tool_calls
        ]
        answer = self.model.bind_tools([get_weather]).invoke([*STORY, asked, *results])
        return [[result.content for result in results], bool(answer.content)]

    def structured_by_schema(self) -> object:
        return self.terse.with_structured_output(Answer, method="json_schema").invoke(STORY).city

    def responses(self) -> object:
        return [block["text"] for block in self.responding.invoke(STORY).content]


def _told(message: AIMessage) -> list[object]:
    usage = message.usage_metadata
    reason = message.response_metadata["finish_reason"]
    return [message.content, usage and usage["total_tokens"], reason]


def outcome(call: Callable[[], object]) -> object:
    """What `call` returns, or how it fails."""
    try:
        return call()
    except Exception:
        return {"failed": traceback.format_exc(limit=-4)}


if __name__ == "__main__":
    calls = Calls(*sys.argv[1:])
    names = [name for name in vars(Calls) if not name.startswith("_")]
    json.dump({name: outcome(getattr(calls, name)) for name in names}, sys.stdout)
