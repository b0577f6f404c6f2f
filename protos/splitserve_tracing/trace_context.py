"""Which trace a request belongs to, as one process tells another (W3C Trace Context)."""

from __future__ import annotations

from dataclasses import dataclass

# 55 in version 00; later versions may append to it.
MAX_TRACEPARENT_CHARS = 128
# As many as the specification asks vendors to pass on.
MAX_TRACESTATE_CHARS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers, as they came. Empty: there was none."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def received(cls, traceparents: list[str], tracestates: list[str]) -> TraceContext:
        """From what a stranger has sent: what is too long, or there twice, is as nothing."""
        if len(traceparents) != 1 or len(traceparents[0]) > MAX_TRACEPARENT_CHARS:
            return NO_CONTEXT
        tracestate = ",".join(tracestates)
        if len(tracestate) > MAX_TRACESTATE_CHARS:
            tracestate = ""
        return cls(traceparents[0], tracestate)


NO_CONTEXT = TraceContext()
