"""Calls of a program of others; their outcomes as lines of JSON: `python -m MODULE BASE_URL`."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable

from pydantic import BaseModel

MODEL, API_KEY = os.environ.get("SPLITSERVE_TEST_MODEL", "fake"), "none"
BASE_URL = f"{sys.argv[1]}/v1" if len(sys.argv) > 1 else ""
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY}


class Weather(BaseModel):
    """Weather of a city."""

    city: str
    celsius: float


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name.
    """
    return f"rain in {city}"


def report(*calls: Callable[[], object]) -> None:
    """Writes why each call failed; an empty text if it did not."""
    for call in calls:
        sys.stdout.write(f"{json.dumps(['check', call.__name__, _failure(call)])}\n")


def _failure(call: Callable[[], object]) -> str:
    try:
        result = call()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception:
        return traceback.format_exc(limit=-3)
    return ""
