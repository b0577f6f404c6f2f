"""Request bodies: limits of size, values and memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest
from starlette.requests import Request
from starlette.types import Message

from splitserve_client import UnreadBudget
from splitserve_common import StaticDiscovery
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.endpoints import Gateway
from splitserve_gateway.grammars import GrammarChecker
from splitserve_gateway.http import (
    FREE_BYTES,
    ApiError,
    BodyBudget,
    BodyShare,
    Exchanges,
    read_body,
)
from splitserve_gateway.schemas import ChatRequest, CompletionRequest
from splitserve_gateway.sharing import FairSemaphore
from splitserve_gateway.upstreams import Fleet

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


def share() -> BodyShare:
    return BodyBudget(16 * MAX_BYTES).share(None)


async def refusal_of(body: bytes, schema: type[CompletionRequest] | type[ChatRequest]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await read_body(request_with(body), schema, MAX_BYTES, share())
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
async def test_body_is_refused_when_it_has_too_many_values(
    body: dict[str, object], code: str
) -> None:
    refused = await refusal_of(json.dumps(body).encode(), CompletionRequest)
    assert (refused.status, refused.code) == (400, code)
    assert len(refused.message) < 300


async def test_body_is_refused_when_it_has_too_many_messages() -> None:
    body = {"messages": [{"role": "user", "content": "a"}] * 5000}
    refused = await refusal_of(json.dumps(body).encode(), ChatRequest)
    assert (refused.status, refused.param) == (400, "messages")


async def test_body_is_taken_when_at_the_limit() -> None:
    token_ids = [[1] * 1024] * 1024
    body = json.dumps({"prompt": token_ids}).encode()
    read = await read_body(request_with(body), CompletionRequest, MAX_BYTES, share())
    assert read.prompts == token_ids
    text = json.dumps([{"name": "x", "value": number} for number in range(20_000)])
    body = json.dumps({"prompt": text}).encode()
    read = await read_body(request_with(body), CompletionRequest, MAX_BYTES, share())
    assert read.prompts == [text]


@pytest.mark.parametrize("is_declared", [True, False])
async def test_body_is_refused_when_it_has_too_many_bytes(is_declared: bool) -> None:
    body = b'{"prompt": "' + b"a" * 1000 + b'"}'
    headers = {"content_length": str(len(body))} if is_declared else {}
    with pytest.raises(ApiError) as raised:
        await read_body(request_with(body, **headers), CompletionRequest, 500, share())
    assert raised.value.status == 413


def prompt_of(num_bytes: int) -> bytes:
    head, tail = b'{"prompt": "', b'"}'
    return head + b"a" * (num_bytes - len(head) - len(tail)) + tail


async def test_bytes_are_given_back_when_the_share_ends() -> None:
    budget = BodyBudget(MAX_BYTES)
    body = prompt_of(MAX_BYTES)
    with budget.share(None) as own:
        await read_body(request_with(body), CompletionRequest, MAX_BYTES, own)
        assert budget.num_bytes == MAX_BYTES - FREE_BYTES
    assert budget.num_bytes == 0
    with budget.share(None) as own, pytest.raises(ApiError):
        await read_body(request_with(body[:-1]), CompletionRequest, MAX_BYTES, own)
    assert budget.num_bytes == 0


async def test_large_body_waits_for_others_and_small_ones_pass() -> None:
    budget = BodyBudget(MAX_BYTES - FREE_BYTES, patience_s=60.0)
    with budget.share(None) as second, budget.share(None) as third:
        with budget.share(None) as first:
            await first.grow(MAX_BYTES)
            waiting = asyncio.create_task(second.grow(FREE_BYTES + 1))
            await third.grow(FREE_BYTES)
            assert not waiting.done()
        await waiting
        assert budget.num_bytes == 1


async def test_body_is_refused_with_429_without_room() -> None:
    budget = BodyBudget(MAX_BYTES // 2, patience_s=0.0)
    with budget.share(None) as own, pytest.raises(ApiError) as raised:
        await read_body(request_with(prompt_of(MAX_BYTES)), CompletionRequest, MAX_BYTES, own)
    assert (raised.value.status, raised.value.code) == (429, "too_many_body_bytes")
    assert raised.value.retry_after_s
    assert budget.num_bytes == 0


async def test_tenant_with_many_bodies_leaves_room_for_others() -> None:
    budget = BodyBudget(16 * MAX_BYTES, patience_s=0.0)
    with ExitStack() as held:
        refused = 0
        for _ in range(17):
            try:
                await held.enter_context(budget.share("greedy")).grow(MAX_BYTES)
            except ApiError:
                refused += 1
        assert refused
        with budget.share("other") as own:
            await own.grow(MAX_BYTES // 2)
    assert budget.num_bytes == 0


async def test_prompt_is_kept_no_longer_than_it_is_read() -> None:
    bodies = BodyBudget(MAX_BYTES)
    schedulers = StaticDiscovery(["127.0.0.1:1"])
    fleet = Fleet(schedulers, UnreadBudget())
    exchanges, checker, turns = Exchanges(1, 1.0), GrammarChecker(), FairSemaphore(1, 1)
    gateway = Gateway(GatewayConfig(), fleet, exchanges, checker, bodies, turns, turns, schedulers)
    request = request_with(prompt_of(2 * FREE_BYTES))
    async with gateway.reading(request, CompletionRequest) as body:
        assert body.prompts
        assert bodies.num_bytes == FREE_BYTES
    assert not body.prompts
    assert bodies.num_bytes == 0
