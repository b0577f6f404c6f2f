"""Checks of LiteLLM's proxy between OpenAI's package and the gateway."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.clients.matrix.checks import (
    API_KEY,
    ASKS_WEATHER,
    BASE_URL,
    FUNCTION,
    HELD,
    MODEL,
    OVERFLOW,
    PATIENCE_S,
    TEXT,
    TOO_LONG,
    WEATHER,
    WEATHER_TOLD,
    Weather,
    get_weather,
    num_aborted,
    says,
    wait_aborted,
    write_outcomes,
)


@contextmanager
def proxy() -> Iterator[openai.OpenAI]:
    """A client of a running proxy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    served = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
    config = {"model_list": [{"model_name": MODEL, "litellm_params": served}]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        program = str(Path(sys.executable).with_name("litellm"))
        command = [program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        key = f"sk-{secrets.token_hex(32)}"
        environ = {**os.environ, "LITELLM_MASTER_KEY": key}
        with subprocess.Popen(command, stdout=sys.stderr, env=environ) as process:
            try:
                _wait_ready(f"http://127.0.0.1:{port}/health/liveliness", process)
                yield openai.OpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0
                )
            finally:
                process.terminate()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 2 * PATIENCE_S
    while True:
        assert process.poll() is None, "the proxy ended"
        assert time.monotonic() < give_up, "the proxy is not ready"
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)


def user(text: str) -> Any:  # noqa: ANN401
    return [{"role": "user", "content": text}]


def main() -> None:
    with proxy() as client:

        def chat() -> None:
            answer = client.chat.completions.create(model=MODEL, messages=user(says(TEXT)))
            assert answer.choices[0].message.content == TEXT

        def stream() -> None:
            chunks = client.chat.completions.create(
                model=MODEL, messages=user(says(TEXT)), stream=True
            )
            pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
            assert len(pieces) > 1
            assert "".join(pieces) == TEXT

        def tools() -> None:
            messages = user(ASKS_WEATHER)
            options: Any = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}
            answer = client.chat.completions.create(messages=messages, **options)
            message = answer.choices[0].message
            (called,) = message.tool_calls
            result = get_weather(**json.loads(called.function.arguments))
            messages += [
                message.model_dump(),
                {"role": "tool", "tool_call_id": called.id, "content": result},
            ]
            answer = client.chat.completions.create(messages=messages, **options)
            assert answer.choices[0].message.content == WEATHER_TOLD

        def structured() -> None:
            answer = client.chat.completions.parse(
                model=MODEL,
                messages=user(says(WEATHER.model_dump_json())),
                response_format=Weather,
            )
            assert answer.choices[0].message.parsed == WEATHER

        def error() -> None:
            try:
                client.chat.completions.create(model=MODEL, messages=user(TOO_LONG))
            except openai.BadRequestError as refused:
                assert OVERFLOW in refused.message, refused.message
                assert "ContextWindowExceededError" in refused.message, refused.message
                return
            raise AssertionError("the prompt was not refused")

        def cancel() -> None:
            before = num_aborted()
            with client.chat.completions.create(
                model=MODEL, messages=user(HELD), stream=True
            ) as chunks:
                while not next(chunks).choices[0].delta.content:
                    pass
            wait_aborted(before)

        write_outcomes("litellm", chat, stream, tools, structured, error, cancel)


if __name__ == "__main__":
    main()
