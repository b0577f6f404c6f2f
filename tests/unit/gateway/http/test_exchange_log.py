"""Lines of the log say which request of HTTP they are about."""

from __future__ import annotations

import asyncio
import json
import logging

from starlette.types import Message, Receive, Scope, Send

from splitserve_gateway.http.exchange import Exchange
from splitserve_gateway.tracing import GatewayTraces
from splitserve_rpc.process_log import JsonFormatter
from splitserve_tracing.trace_config import TraceConfig
from splitserve_tracing.tracing import Tracing

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
