"""A request says which span of its caller it belongs to."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from splitserve_client import TraceContext
from splitserve_client.resumable_request import ResumableRequest, Submission, current_trace

ROOT = Path(__file__).parents[3]


def message_of(trace_context: TraceContext | None = None) -> tuple[str, str]:
    submission = Submission([1])
    if trace_context is not None:
        submission = Submission([1], trace_context=trace_context)
    message = ResumableRequest(submission, time.monotonic).message()
    return message.traceparent, message.tracestate


def test_request_belongs_to_the_span_that_is_current_as_opentelemetry_writes_it() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("of the caller"):
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)

        assert message_of() == (headers["traceparent"], "")
        assert message_of(TraceContext("given", "a=1")) == ("given", "a=1")


def test_request_says_that_it_is_not_to_be_traced_when_its_caller_is_not() -> None:
    tracer = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("of the caller"):
        flags = int(current_trace().traceparent[-2:], 16)
        assert flags & 1 == 0


def test_request_belongs_to_nothing_when_no_span_is_current() -> None:
    assert message_of() == ("", "")


def test_opentelemetry_is_not_imported_for_that() -> None:
    program = """
import sys
from splitserve_client.resumable_request import current_trace
assert current_trace().traceparent == ""
print([name for name in sys.modules if "opentelemetry" in name])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(str(ROOT / each) for each in ("common", "protos", "clients"))},
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout == "[]\n"
