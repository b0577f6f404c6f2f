"""Checks of Instructor, with OpenAI's API, in each of its modes."""

from __future__ import annotations

import instructor
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI

from tests.clients.matrix.checks import (
    API_KEY,
    BASE_URL,
    MODEL,
    OVERFLOW,
    TOO_LONG,
    WEATHER,
    Weather,
    call,
    run,
    says,
)

SAID = {
    "TOOLS": call("Weather", **WEATHER.model_dump()),
    "TOOLS_STRICT": call("Weather", **WEATHER.model_dump()),
    "JSON": WEATHER.model_dump_json(),
    "MD_JSON": f"Here it is:\n```json\n{WEATHER.model_dump_json()}\n```",
    "JSON_SCHEMA": WEATHER.model_dump_json(),
    "RESPONSES_TOOLS": call("Weather", **WEATHER.model_dump()),
}


def client(mode: str) -> instructor.Instructor:
    plain = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    return instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))


def structured() -> None:
    for mode, said in SAID.items():
        answer = client(mode).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": says(said)}],
            response_model=Weather,
            max_retries=0,
        )
        assert answer.model_dump() == WEATHER.model_dump(), mode


def stream() -> None:
    parts = client("TOOLS").chat.completions.create_partial(
        model=MODEL,
        messages=[{"role": "user", "content": says(SAID["TOOLS"])}],
        response_model=Weather,
        max_retries=0,
    )
    *_, last = parts
    assert last.model_dump() == WEATHER.model_dump()


def retry() -> None:
    wrong = call("Weather", city="Oslo", celsius="cold")
    answer = client("TOOLS").chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": says(wrong, SAID["TOOLS"])}],
        response_model=Weather,
        max_retries=2,
    )
    assert answer.model_dump() == WEATHER.model_dump()


def error() -> None:
    try:
        client("TOOLS").chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": TOO_LONG}],
            response_model=Weather,
            max_retries=0,
        )
    except InstructorRetryException as refused:
        assert OVERFLOW in str(refused), refused
        return
    raise AssertionError("the prompt was not refused")


if __name__ == "__main__":
    run("instructor", structured, stream, retry, error)
