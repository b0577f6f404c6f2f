"""Whose doing a log line is: the request, and the trace, that the code that logs works for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogContext:
    """`request_id`: as its caller knows it. `trace_id`: 32 digits in hex; empty: not traced."""

    request_id: str
    trace_id: str = ""

    def fields(self) -> dict[str, str]:
        """What a line says of it."""
        named = {"request_id": self.request_id, "trace_id": self.trace_id}
        return {name: value for name, value in named.items() if value}


# Of a task: what it starts inherits it, its siblings do not.
log_context: ContextVar[LogContext | None] = ContextVar("log_context", default=None)


@contextmanager
def logging_about(context: LogContext) -> Iterator[None]:
    """Lines within are about this request, whoever's code it is that writes them."""
    token = log_context.set(context)
    try:
        yield
    finally:
        log_context.reset(token)


def context_fields() -> dict[str, str]:
    """Of the code that calls this; empty if it works for no request in particular."""
    context = log_context.get()
    return {} if context is None else context.fields()
