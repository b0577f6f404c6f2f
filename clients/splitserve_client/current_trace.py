"""Current OpenTelemetry span of the calling code, if the program uses OpenTelemetry."""

from __future__ import annotations

import sys

from splitserve_client.types import NO_TRACE, TraceContext


def current_trace() -> TraceContext:
    """Returns the span of the current task.

    NO_TRACE without OpenTelemetry, which is never imported here.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return NO_TRACE
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return NO_TRACE
    traceparent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return TraceContext(traceparent, span.trace_state.to_header())
