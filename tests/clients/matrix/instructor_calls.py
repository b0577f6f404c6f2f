"""Calls of Instructor, in each of its modes."""

from __future__ import annotations

import instructor
from openai import OpenAI

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, Weather, report

MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS")


def modes() -> None:
    for mode in MODES:
        plain = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            response_model=Weather,
            max_retries=0,
        )


def partial() -> None:
    plain = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    stream = instructor.from_openai(plain).chat.completions.create_partial(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        response_model=Weather,
        max_retries=0,
    )
    list(stream)


if __name__ == "__main__":
    report(modes, partial)
