"""Calls of LiteLLM, as for several providers."""

from __future__ import annotations

from typing import Any

import litellm

from tests.clients.matrix.checks import API_KEY, BASE_URL, FUNCTION, MODEL, Weather, report

CACHED = {"cache_control": {"type": "ephemeral"}}
PROVIDERS = ("openai", "hosted_vllm", "litellm_proxy", "deepseek", "openrouter", "dashscope",
             "moonshot", "lm_studio", "mistral")  # fmt: skip
USER = {"role": "user", "content": "hi"}


def options(provider: str) -> dict[str, Any]:
    given = {"model": f"{provider}/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
    return {**given, "num_retries": 0, "max_retries": 0}


def tools() -> None:
    given = [{"type": "function", "function": FUNCTION, **CACHED}]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief.", **CACHED}]}
    for provider in PROVIDERS:
        messages: list[Any] = [system, USER]
        for _ in range(2):
            answer = litellm.completion(messages=messages, tools=given, **options(provider))
            message = answer.choices[0].message
            messages.append(message if message.tool_calls else message.model_dump())
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "rain"}
                for call in message.tool_calls or ()
            ]
        messages.append(USER)
        list(litellm.completion(messages=messages, stream=True, **options(provider)))


def structured() -> None:
    litellm.completion(messages=[USER], response_format=Weather, **options("openai"))


def thinking() -> None:
    mode = {"type": "enabled", "budget_tokens": 1024}
    litellm.completion(messages=[USER], thinking=mode, **options("hosted_vllm"))


def responses() -> None:
    litellm.responses(input="hi", **options("openai"))


def embeddings() -> None:
    litellm.embedding(input=["t1"], **options("openai"))


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    report(tools, structured, thinking, responses, embeddings)
