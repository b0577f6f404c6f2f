"""What LiteLLM gets from a gateway, as JSON: run by `test_other_clients.py`.

`python litellm_calls.py BASE_URL MODEL`, with the Python that has LiteLLM.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import litellm

STORY = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me a story about a fox."},
]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Calls:
    """One method for each call; what it returns is compared by the test."""

    def __init__(self, base_url: str, model: str) -> None:
        self.options: dict[str, Any] = {
            "model": f"openai/{model}",
            "api_base": f"{base_url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 8,
            "num_retries": 0,
            "max_retries": 0,
        }
        # Against white space without end.
        self.terse = {**self.options, "max_tokens": 120, "frequency_penalty": 2}

    def completion(self) -> object:
        answer = litellm.completion(messages=STORY, **self.options)
        choice = answer.choices[0]
        return [choice.message.content, answer.usage.total_tokens, choice.finish_reason]

    def streamed_with_usage(self) -> object:
        stream = litellm.completion(
            messages=STORY, stream=True, stream_options={"include_usage": True}, **self.options
        )
        whole = litellm.stream_chunk_builder(list(stream), messages=STORY)
        return [whole.choices[0].message.content, whole.usage.total_tokens]

    def asynchronously_streamed(self) -> object:
        async def read() -> str:
            stream = await litellm.acompletion(messages=STORY, stream=True, **self.options)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return asyncio.run(read())

    def text(self) -> object:
        options = {
            **self.options,
            "model": self.options["model"].replace("openai/", "text-completion-openai/"),
        }
        return litellm.text_completion(prompt="Once upon a time", **options).choices[0].text

    def tools(self) -> object:
        function = {"name": "get_weather", "description": "Of a city.", "parameters": CITY}
        answer = litellm.completion(
            messages=STORY,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            **self.terse,
        )
        calls = answer.choices[0].message.tool_calls
        return [[call.function.name, json.loads(call.function.arguments)] for call in calls]

    def structured(self) -> object:
        schema = {"name": "answer", "schema": CITY, "strict": True}
        answer = litellm.completion(
            messages=STORY,
            response_format={"type": "json_schema", "json_schema": schema},
            **self.terse,
        )
        return json.loads(answer.choices[0].message.content)

    def unknown_model(self) -> object:
        try:
            litellm.completion(messages=STORY, **{**self.options, "model": "openai/nobody"})
        except litellm.NotFoundError as error:
            return error.status_code
        return "no error"

    def overflow(self) -> object:
        try:
            long = [{"role": "user", "content": "word " * 100_000}]
            litellm.completion(messages=long, **self.options)
        except litellm.ContextWindowExceededError as error:
            return error.status_code
        return "no error"


def outcome(call: Callable[[], object]) -> object:
    """What `call` returns, or how it fails."""
    try:
        return call()
    except Exception:
        return {"failed": traceback.format_exc(limit=-4)}


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    calls = Calls(*sys.argv[1:])
    names = [name for name in vars(Calls) if not name.startswith("_")]
    json.dump({name: outcome(getattr(calls, name)) for name in names}, sys.stdout)
