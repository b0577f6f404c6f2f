"""Spans of a process, and a collector that takes them or does not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from splitserve_tracing.trace_config import NO_CONTEXT, TraceConfig, TraceContext
from splitserve_tracing.tracing import ToldExporter, Tracing

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
URL = "http://localhost:4317"


class Refusing(SpanExporter):
    """A collector that takes spans while `takes`."""

    def __init__(self) -> None:
        self.takes = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE


class Hanging(SpanExporter):
    """A collector that never answers, until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait()
        return SpanExportResult.FAILURE


def tracing(exporter: SpanExporter, ratio: float = 1.0) -> Tracing:
    return Tracing(TraceConfig(URL, ratio), "test", exporter)


def test_whoever_works_for_a_span_is_told_of_it() -> None:
    exporter = InMemorySpanExporter()
    made = tracing(exporter)
    span, context = made.begin(NO_CONTEXT, "a", {}, 1)
    assert span is not None
    next_span, _ = made.begin(context, "b", {}, 2)
    assert next_span is not None
    next_span.end(3)
    span.end(4)
    made.close()

    inner, outer = exporter.get_finished_spans()
    assert inner.parent is not None
    assert inner.context is not None
    assert outer.context is not None
    assert inner.parent.span_id == outer.context.span_id
    assert inner.context.trace_id == outer.context.trace_id


@pytest.mark.parametrize(
    "received", [NO_CONTEXT, TraceContext(f"00-{TRACE_ID}-{PARENT_ID}-00"), TraceContext("x")]
)
def test_whoever_works_for_what_is_not_sampled_writes_nothing_either(
    received: TraceContext,
) -> None:
    made = tracing(InMemorySpanExporter(), ratio=0.0)
    span, context = made.begin(received, "a", {}, 1)
    made.close()
    after = tracing(InMemorySpanExporter(), ratio=1.0)
    next_span, _ = after.begin(context, "b", {}, 1)
    after.close()

    assert span is None
    assert next_span is None
    if received.traceparent.startswith("00"):
        assert context == received


def test_collector_that_is_gone_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = [0.0]
    collector = Refusing()
    exporter = ToldExporter(collector, URL, lambda: now_s[0])
    exporter.export([ReadableSpan("a")] * 3)
    for _ in range(100):
        now_s[0] += 0.59
        exporter.export([ReadableSpan("a")])
    said = [record.getMessage() for record in caplog.records]
    now_s[0] += 2.0
    exporter.export([ReadableSpan("a")])
    collector.takes = True
    exporter.export([ReadableSpan("a")])
    exporter.export([ReadableSpan("a")])

    assert said == [f"traces_not_exported url={URL} num_lost=3"]
    assert [record.getMessage() for record in caplog.records][1:] == [
        f"traces_not_exported url={URL} num_lost=104",
        f"traces_exported_again url={URL} num_lost=104",
    ]


def test_process_ends_when_its_collector_never_answers() -> None:
    exporter = Hanging()
    made = tracing(exporter)
    for _ in range(3):
        span, _ = made.begin(NO_CONTEXT, "a", {}, 1)
        assert span is not None
        span.end(2)
    made.close()

    assert not exporter.released.is_set()
    exporter.released.set()


def test_attributes_are_bounded() -> None:
    exporter = InMemorySpanExporter()
    made = tracing(exporter)
    span, _ = made.begin(NO_CONTEXT, "a", {f"a{i}": "x" * 1000 for i in range(100)}, 1)
    assert span is not None
    for _ in range(1000):
        span.add_event("e", {"a": 1}, 1)
    span.end(2)
    made.close()

    (ended,) = exporter.get_finished_spans()
    assert ended.attributes is not None
    assert len(ended.attributes) == 64
    assert {len(str(value)) for value in ended.attributes.values()} == {256}
    assert len(ended.events) == 128


@pytest.mark.parametrize(
    ("traceparents", "tracestates", "expected"),
    [
        ([], ["a=1"], NO_CONTEXT),
        (["a", "b"], [], NO_CONTEXT),
        (["a" * 129], [], NO_CONTEXT),
        (["a"], ["b=1", "c=2"], TraceContext("a", "b=1,c=2")),
        (["a"], ["b" * 300, "c" * 300], TraceContext("a")),
    ],
)
def test_headers_that_are_too_long_or_there_twice_are_as_none(
    traceparents: list[str], tracestates: list[str], expected: TraceContext
) -> None:
    assert TraceContext.received(traceparents, tracestates) == expected
