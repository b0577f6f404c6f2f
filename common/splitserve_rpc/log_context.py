"""Context of log lines: the request and the trace on behalf of which code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogContext:
    """Request of a log line. `request_id`: the caller's id. `trace_id`: 32 hex digits, or empty."""

    request_id: str
    trace_id: str = ""

    def fields(self) -> dict[str, str]:
        """Returns the non-empty fields by name."""
        named = {"request_id": self.request_id, "trace_id": self.trace_id}
        return {name: value for name, value in named.items() if value}


# Set per task: child tasks inherit the context, sibling tasks do not.
log_context: ContextVar[LogContext | None] = ContextVar("log_context", default=None)


@contextmanager
def logging_about(context: LogContext) -> Iterator[None]:
    """Context manager: all log lines within, from any package, belong to this request."""
    token = log_context.set(context)
    try:
        yield
    finally:
        log_context.reset(token)


def context_fields() -> dict[str, str]:
    """Returns the log fields of the calling code's request; empty if there is none."""
    context = log_context.get()
    return {} if context is None else context.fields()
