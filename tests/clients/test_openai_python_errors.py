"""The official Python package: what its exceptions say."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.stories import (
    USER,
)


def test_error_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="nobody", messages=[USER])

    assert raised.value.param == "model"
    assert "nobody" in raised.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_error_bad_request_names_the_field(
    client: OpenAI, model: str, fields: dict[str, Any], param: str
) -> None:
    body = {"model": model, "messages": [USER], **fields}

    with pytest.raises(openai.BadRequestError) as raised:
        client.post("/chat/completions", body=body, cast_to=object)

    assert (raised.value.param or "").startswith(param)
    assert raised.value.type == "invalid_request_error"


@pytest.mark.parametrize("is_stream", [False, True])
def test_error_prompt_beyond_the_model_is_a_bad_request(
    client: OpenAI, model: str, is_stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt=[5] * 2100, stream=is_stream)

    assert raised.value.code == "context_length_exceeded"


def test_error_server_that_is_not_there_is_a_connection_error() -> None:
    with (
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()
