"""The span that the caller's own code works in, if it has any to do with OpenTelemetry."""

from __future__ import annotations

import sys

from splitserve_client.types import NO_TRACE, TraceContext


def current_trace() -> TraceContext:
    """Of this task. Whoever does not use OpenTelemetry has none, and does not get it imported."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return NO_TRACE
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return NO_TRACE
    traceparent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return TraceContext(traceparent, span.trace_state.to_header())
