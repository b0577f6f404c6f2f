"""Traces of the gateway: a span per HTTP request, and a child span per request to a scheduler.

Without `--traces-to` the gateway creates no spans and does not import OpenTelemetry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from splitserve_text import (
    TraceContext as SentContext,
)
from splitserve_tracing import TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.types import Scope

    from splitserve_tracing.tracing import Tracing

SERVICE = "splitserve-gateway"
_OTHER = "other"
# Bound on child spans: a request with several prompts makes one scheduler call per prompt.
_MAX_CALLS = 64
_SERVER_ERROR = 500


class GatewayTraces:
    """Starts a trace for each HTTP request, or continues the caller's trace."""

    def __init__(self, tracing: Tracing, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.tracing = tracing
        self.now_ns = now_ns

    def begin(self, scope: Scope) -> ExchangeTrace:
        """Starts the span of an arrived request.

        Reads `traceparent` and `tracestate` of its headers.
        """
        found: dict[bytes, list[str]] = {b"traceparent": [], b"tracestate": []}
        for name, value in scope["headers"]:
            if name in found:
                found[name].append(value.decode("latin-1"))
        received = TraceContext.received(found[b"traceparent"], found[b"tracestate"])
        method = scope["method"]
        span, passed_on = self.tracing.begin(
            received, method, {"http.request.method": method}, self.now_ns()
        )
        return ExchangeTrace(self, span, passed_on, method)


class ExchangeTrace:
    """Span of one HTTP request.

    `span`: None if the trace is not sampled; schedulers are told so.
    """

    def __init__(
        self, traces: GatewayTraces, span: Span | None, passed_on: TraceContext, method: str
    ) -> None:
        self.span = span
        self._traces = traces
        self._method = method
        self._passed_on = SentContext(passed_on.traceparent, passed_on.tracestate)
        self._num_calls = 0

    @property
    def trace_id(self) -> str:
        """Trace id in hexadecimal, for the log; empty if the trace is not sampled."""
        return "" if self.span is None else f"{self.span.get_span_context().trace_id:032x}"

    def answer_began(self) -> None:
        """Notes that the first byte of the answer's body was sent."""
        if self.span is not None:
            self.span.add_event("first_byte", timestamp=self._traces.now_ns())

    def call(self, address: str) -> CallTrace:
        """Starts the child span of a request to the scheduler at `address`."""
        self._num_calls += 1
        if self.span is None or self._num_calls > _MAX_CALLS:
            return CallTrace(self._traces, None, self._passed_on)
        span = self._traces.tracing.child(
            self.span,
            "submit",
            {"server.address": address, "splitserve.attempt": self._num_calls},
            self._traces.now_ns(),
            is_call=True,
        )
        context = self._traces.tracing.context_of(span)
        return CallTrace(self._traces, span, SentContext(context.traceparent, context.tracestate))

    def end(self, path: str, code: int, request_id: str) -> None:
        """Ends the span.

        `path`: path of the route; `code`: HTTP status, 0 if no answer was sent.
        """
        if self.span is None:
            return
        if path != _OTHER:
            self.span.update_name(f"{self._method} {path}")
        self.span.set_attributes(
            {
                "http.route": path,
                "http.response.status_code": code,
                "splitserve.request_id": request_id,
                "splitserve.num_calls": self._num_calls,
            }
        )
        if code == 0 or code >= _SERVER_ERROR:
            self._traces.tracing.fail(self.span, f"status {code}")
        self.span.end(self._traces.now_ns())


class CallTrace:
    """Span of one request to a scheduler. `context`: trace context sent to the scheduler."""

    def __init__(self, traces: GatewayTraces, span: Span | None, context: SentContext) -> None:
        self.context = context
        self._traces = traces
        self._span = span

    def end(self, error: BaseException | None) -> None:
        """Ends the span. `error`: exception that ended the request, None for a regular end.

        Cancellation and a closed generator (the caller left) do not count as errors.
        """
        if self._span is None:
            return
        if isinstance(error, Exception):
            self._traces.tracing.fail(self._span, type(error).__name__)
        self._span.end(self._traces.now_ns())


# Trace of the request that the current task handles.
exchange_trace: ContextVar[ExchangeTrace | None] = ContextVar("exchange_trace", default=None)
