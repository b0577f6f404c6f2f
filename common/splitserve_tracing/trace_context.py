"""Trace context of a request, passed between processes (W3C Trace Context)."""

from __future__ import annotations

from dataclasses import dataclass

# 55 characters in version 00; later versions may append more.
MAX_TRACEPARENT_CHARS = 128
# Minimum that the specification asks vendors to pass on.
MAX_TRACESTATE_CHARS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Headers of a trace context, unchanged. Empty: no context."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def received(cls, traceparents: list[str], tracestates: list[str]) -> TraceContext:
        """Returns the context in untrusted headers.

        Ignores headers that are repeated or too long.
        """
        if len(traceparents) != 1 or len(traceparents[0]) > MAX_TRACEPARENT_CHARS:
            return NO_CONTEXT
        tracestate = ",".join(tracestates)
        if len(tracestate) > MAX_TRACESTATE_CHARS:
            tracestate = ""
        return cls(traceparents[0], tracestate)


NO_CONTEXT = TraceContext()
