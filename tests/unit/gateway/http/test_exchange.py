"""Event streams, request ids in logs, errors, and origins of connections."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from splitserve_client import RequestFailed
from splitserve_common import JsonFormatter
from splitserve_gateway.http import (
    MESSAGE_EVENTS,
    Exchange,
    Exchanges,
    Guard,
    IdentifiedEvent,
    api_error,
    event_stream,
    invalid,
    origin_of,
)
from splitserve_gateway.tracing import GatewayTraces
from splitserve_tracing import TraceConfig
from splitserve_tracing.tracing import Tracing

COMMENT = b": waiting\n\n"
SOON_S = 0.001


class Sent:
    """What a stream sent; `has_comments` is set once there are two comments more."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.has_comments = asyncio.Event()

    async def send(self, message: Message) -> None:
        if "body" in message:
            self.pieces.append(message["body"])
        if [piece[:2] for piece in self.pieces[-2:]] == [COMMENT[:2]] * 2:
            self.has_comments.set()

    async def comments(self) -> None:
        self.has_comments.clear()
        await self.has_comments.wait()


async def sent_by(
    events: AsyncGenerator[object, None], silence_s: float, sent: Sent
) -> list[bytes]:
    async def receive() -> Message:
        raise AssertionError("a stream of events reads nothing")

    async with asyncio.timeout(240):
        response = await event_stream(events, silence_s=silence_s)
        await response({"type": "http"}, receive, sent.send)
    return sent.pieces


async def test_comments_are_sent_while_nothing_comes() -> None:
    sent = Sent()

    async def events() -> AsyncGenerator[object, None]:
        await sent.comments()
        yield 1
        await sent.comments()
        yield 2

    pieces = await sent_by(events(), SOON_S, sent)

    told = [piece for piece in pieces if piece != COMMENT]
    assert told == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    assert pieces.index(told[0]) >= 2
    assert pieces.index(told[1]) >= pieces.index(told[0]) + 3


async def test_client_of_openai_takes_no_comment_for_an_event_when_events_have_ids() -> None:
    sent = Sent()
    told = [{"choices": [{"index": 0, "text": text}]} for text in ("a", "b")]

    async def events() -> AsyncGenerator[object, None]:
        for number, chunk in enumerate(told):
            await sent.comments()
            yield IdentifiedEvent(f"e{number}", chunk)
        await sent.comments()

    body = b"".join(await sent_by(events(), SOON_S, sent))

    assert body.count(COMMENT[:-1]) >= 6
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(
        lambda _request: httpx2.Response(200, headers=headers, content=body)
    )
    http_client = httpx2.Client(transport=transport)
    client = openai.OpenAI(base_url="http://gateway/v1", api_key="k", http_client=http_client)
    stream = client.completions.create(model="m", prompt="p", stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["a", "b"]


async def test_no_comment_is_sent_while_events_come() -> None:
    async def events() -> AsyncGenerator[object, None]:
        for number in range(50):
            await asyncio.sleep(0)
            yield number

    pieces = await sent_by(events(), 15.0, Sent())

    assert len(pieces) == 51
    assert COMMENT not in pieces


async def test_pings_are_sent_while_no_more_comes_of_a_message() -> None:
    events_asked = asyncio.Event()
    pieces: list[bytes] = []
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    async def events() -> AsyncGenerator[object, None]:
        yield {"type": "message_start"}
        await events_asked.wait()
        raise invalid("no more")

    async def send(message: Message) -> None:
        pieces.append(message.get("body", b""))
        if pieces[-2:] == [ping] * 2:
            events_asked.set()

    async def receive() -> Message:
        raise AssertionError("a stream of events reads nothing")

    async with asyncio.timeout(240):
        response = await event_stream(events(), MESSAGE_EVENTS, SOON_S)
        await response({"type": "http"}, receive, send)

    told = [piece for piece in pieces if piece not in (b"", ping)]
    assert told[0] == b'event: message_start\ndata: {"type":"message_start"}\n\n'
    assert told[1].startswith(b'event: error\ndata: {"type":"error","error":{"type":"invalid_requ')
    assert len(told) == 2


@pytest.mark.parametrize(
    ("path", "is_anthropic"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages2", False),
        ("/v1/chat/completions", False),
    ],
)
async def test_refusal_before_the_application_has_the_shape_of_the_path(
    path: str, is_anthropic: bool
) -> None:
    sent: list[Message] = []
    exchanges = Exchanges(0, 60.0)
    unused: Any = None

    async def send(message: Message) -> None:
        sent.append(message)

    await Guard(unused, exchanges)({**SCOPE, "path": path}, unused, send)

    headers = dict(sent[0]["headers"])
    content = json.loads(sent[1]["body"])
    assert sent[0]["status"] == 429
    assert content["error"]["type"] == "rate_limit_error"
    assert (b"request-id" in headers) == is_anthropic
    assert content.get("request_id", "").encode() == headers.get(b"request-id", b"")


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SCOPE: Scope = {
    "type": "http",
    "method": "GET",
    "path": "/",
    "headers": [(b"traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01".encode())],
}


async def test_line_has_the_ids_that_the_caller_gets_and_sent() -> None:
    lines: list[dict[str, str]] = []
    answered: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        made = logging.LogRecord("splitserve_gateway", logging.INFO, "f", 1, "event", (), None)
        # In a task that serves it, too.
        line = await asyncio.create_task(asyncio.to_thread(JsonFormatter().format, made))
        lines.append(json.loads(line))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        answered.append(message)

    tracing = Tracing(TraceConfig("http://localhost:1", 0.0), "test")
    trace = GatewayTraces(tracing).begin(SCOPE)
    await asyncio.create_task(Exchange(SCOPE, receive, send, trace).run(app, 60.0))
    await asyncio.to_thread(tracing.close)

    (line,) = lines
    assert line["trace_id"] == TRACE_ID
    assert dict(answered[0]["headers"])[b"x-request-id"] == line["request_id"].encode()


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("a-socket", "another", False),
    ],
)
def test_origins_are_addresses_or_networks(one: str, other: str, are_same: bool) -> None:
    assert (origin_of((one, 1)) == origin_of((other, 2))) is are_same


def test_origin_is_empty_when_there_is_none() -> None:
    assert origin_of(None) == ""


@pytest.mark.parametrize(
    ("reason", "status"), [("ROW_FAILED", 500), ("EXECUTOR_LOST_REPEATEDLY", 422)]
)
def test_api_error_is_not_retryable_when_executors_died(reason: str, status: int) -> None:
    error = api_error(RequestFailed("it failed", reason=reason))
    assert (error.status, error.code) == (status, reason.lower())
