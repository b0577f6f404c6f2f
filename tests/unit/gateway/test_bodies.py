"""Request bodies: what is refused before it costs much."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.types import Message

from splitserve_gateway.http.bodies import read_body
from splitserve_gateway.http.errors import ApiError
from splitserve_gateway.schemas.chat import ChatRequest
from splitserve_gateway.schemas.completions import CompletionRequest

MAX_BYTES = 16 * 2**20


def request_with(body: bytes, **headers: str) -> Request:
    async def pieces() -> AsyncIterator[Message]:
        for start in range(0, len(body), 65_536):
            piece = body[start : start + 65_536]
            yield {"type": "http.request", "body": piece, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    receive = pieces().__anext__
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


async def refusal_of(body: bytes, schema: type[CompletionRequest] | type[ChatRequest]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await read_body(request_with(body), schema, MAX_BYTES)
    return raised.value


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": [[1]] * 100_000}, "too_many_values"),
        ({"prompt": [1] * 1_300_000}, "too_many_values"),
        ({str(number): 1 for number in range(100_000)}, "too_many_values"),
        ({"metadata": [[]] * 100_000}, "too_many_values"),
        ({str(number): 1 for number in range(1000)}, "invalid_value"),
        ({"prompt": ["a", *range(1000)]}, "invalid_value"),
    ],
)
async def test_body_is_refused_by_what_it_has_when_that_is_too_much(
    body: dict[str, object], code: str
) -> None:
    refused = await refusal_of(json.dumps(body).encode(), CompletionRequest)
    assert (refused.status, refused.code) == (400, code)
    assert len(refused.message) < 300


async def test_body_is_refused_when_it_has_too_many_messages() -> None:
    body = {"messages": [{"role": "user", "content": "a"}] * 5000}
    refused = await refusal_of(json.dumps(body).encode(), ChatRequest)
    assert (refused.status, refused.param) == (400, "messages")


async def test_body_is_taken_when_it_is_as_large_as_can_be() -> None:
    token_ids = [[1] * 1024] * 1024
    body = json.dumps({"prompt": token_ids}).encode()
    read = await read_body(request_with(body), CompletionRequest, MAX_BYTES)
    assert read.prompts == token_ids
    text = json.dumps([{"name": "x", "value": number} for number in range(20_000)])
    body = json.dumps({"prompt": text}).encode()
    assert (await read_body(request_with(body), CompletionRequest, MAX_BYTES)).prompts == [text]


@pytest.mark.parametrize("is_declared", [True, False])
async def test_body_is_refused_when_it_has_too_many_bytes(is_declared: bool) -> None:
    body = b'{"prompt": "' + b"a" * 1000 + b'"}'
    headers = {"content_length": str(len(body))} if is_declared else {}
    with pytest.raises(ApiError) as raised:
        await read_body(request_with(body, **headers), CompletionRequest, 500)
    assert raised.value.status == 413
