"""Scripts of one client, its checks or its calls: what those in this folder have in common.

`python -m tests.clients.matrix.CLIENT_checks URL`, with the Python that has the client. Each check
or call is a line of JSON on the standard output: its name, and why it failed, empty if it did not.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable

from pydantic import BaseModel

MODEL, API_KEY = "fake", "none"
URL = sys.argv[1] if len(sys.argv) > 1 else ""
BASE_URL = f"{URL}/v1"
TEXT = "The fox jumps over Ünïts {°}."
# More than the model takes.
TOO_LONG = "fox " * 20_000
OVERFLOW = "This model's maximum context length is"
PATIENCE_S = 30.0
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA}


class Weather(BaseModel):
    """Weather of a city."""

    city: str
    celsius: float


WEATHER = Weather(city="Oslo", celsius=1.5)


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name.
    """
    return f"rain in {city}"


def says(*answers: str) -> str:
    """A user's message that the model answers with the first of `answers`.

    The next ones answer the results of tools.
    """
    return f"Please. [[[{'|||'.join(answers)}]]]"


def call(name: str, **arguments: object) -> str:
    """An answer that calls a tool."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


ASKS_WEATHER = says(call("get_weather", city="Oslo"), "It says: {result}")
WEATHER_TOLD = "It says: rain in Oslo"
HELD = says("The fox{hold}")


def num_aborted() -> int:
    """Number of requests that were aborted so far."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": says("{aborted}")}]}
    request = urllib.request.Request(
        f"{BASE_URL}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return int(json.load(response)["choices"][0]["message"]["content"])


def wait_aborted(before: int) -> None:
    """Waits until more than `before` requests were aborted. Raises AssertionError."""
    give_up = time.monotonic() + PATIENCE_S
    while num_aborted() <= before:
        assert time.monotonic() < give_up, "the request was not aborted"
        time.sleep(0.05)


def run(package: str, *checks: Callable[[], object]) -> None:
    """Runs the checks of the client that is installed as `package`, and exits without waiting."""
    write_outcomes(package, *checks)
    # Some clients leave threads that would be waited for.
    os._exit(0)


def write_outcomes(package: str, *checks: Callable[[], object]) -> None:
    """Runs the checks of the client that is installed as `package`."""
    _write("version", importlib.metadata.version(package))
    report(*checks)


def report(*checks: Callable[[], object]) -> None:
    """Runs checks or calls."""
    for check in checks:
        _write(check.__name__, _problem(check))


def _write(name: str, outcome: str) -> None:
    sys.stdout.write(f"\n{json.dumps(['check', name, outcome])}\n")
    sys.stdout.flush()


def _problem(check: Callable[[], object]) -> str:
    try:
        result = check()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except BaseException:
        return traceback.format_exc(limit=-4)
    return ""
