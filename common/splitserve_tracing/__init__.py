"""Traces of requests, for OpenTelemetry collectors (ADR 24)."""

from splitserve_tracing.trace_config import NO_CONTEXT, Sampling, TraceConfig, TraceContext

__all__ = ["NO_CONTEXT", "Sampling", "TraceConfig", "TraceContext"]
