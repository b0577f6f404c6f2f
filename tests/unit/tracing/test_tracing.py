"""Tests traces: configuration, sampling, spans and their export."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from splitserve_rpc import SecurityUnusable
from splitserve_tracing import NO_CONTEXT, Sampling, TraceConfig, TraceContext
from splitserve_tracing.tracing import LossReportingExporter, Tracing

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
    exporter = LossReportingExporter(collector, URL, lambda: now_s[0])
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
def test_unusable_trace_headers_are_ignored(
    traceparents: list[str], tracestates: list[str], expected: TraceContext
) -> None:
    assert TraceContext.received(traceparents, tracestates) == expected


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sampling(ratio: float = 0.0, most: float = 5.0, draw: float = 0.5) -> tuple[Sampling, Clock]:
    clock = Clock()
    return Sampling(ratio, most, clock, lambda: draw), clock


@pytest.mark.parametrize(
    ("made", "asked", "taken"),
    [
        (sampling(ratio=1.0), [False], [False]),
        # A share of those who say nothing is drawn.
        (sampling(ratio=0.51), [None], [True]),
        (sampling(ratio=0.5), [None], [False]),
        # Callers who ask get so many a second, and are drawn as others are beyond that.
        (sampling(), [True] * 7, [True] * 5 + [False] * 2),
        (sampling(ratio=1.0, most=0.0), [True], [True]),
        (sampling(most=0.0), [True], [False]),
    ],
)
def test_sampling_takes_callers_as_they_ask(
    made: tuple[Sampling, Clock], asked: list[bool | None], taken: list[bool]
) -> None:
    sampler, _ = made
    assert [sampler.takes(each) for each in asked] == taken


def test_sampling_takes_more_callers_when_time_has_passed() -> None:
    made, clock = sampling()
    assert [made.takes(True) for _ in range(6)] == [True] * 5 + [False]
    clock.now_s += 0.2
    assert [made.takes(True) for _ in range(2)] == [True, False]


def test_decided_traces_leave_others_their_number() -> None:
    made, _ = sampling(most=2.0)

    assert all(made.takes(True, is_decided=True) for _ in range(100))
    assert [made.takes(True) for _ in range(3)] == [True, True, False]
    assert not made.takes(False, is_decided=True)
    assert not made.takes(None, is_decided=True)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40)), max_size=30))
def test_bound_holds_whatever_callers_do(bursts: list[tuple[float, int]]) -> None:
    made, clock = sampling(most=10.0)
    taken = 0
    for pause_s, number in bursts:
        clock.now_s += pause_s
        taken += sum(made.takes(True) for _ in range(number))

    assert taken <= 10 + 10 * clock.now_s


def made(url: str | None, *, insecure: bool = False) -> TraceConfig | None:
    return TraceConfig.from_options(
        {
            "traces_to": url,
            "trace_sampling": 0.5,
            "traces_asked_per_s": 3.0,
            "insecure": insecure,
        }
    )


def test_nobody_gets_traces_when_nothing_is_said() -> None:
    assert made(None) is None


@pytest.mark.parametrize("url", ["http://localhost:4317", "http://[::1]:1", "https://a.b:4317"])
def test_collector_is_what_was_said(url: str) -> None:
    assert made(url) == TraceConfig(url, 0.5, 3.0)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4317",
        "http://localhost",
        "ftp://localhost:1",
        "http://user:password@localhost:1",
        "http://localhost:1/v1/traces",
        "http://localhost:1?a=b",
    ],
)
def test_url_is_refused_when_it_is_none_of_a_collector(url: str) -> None:
    with pytest.raises(SecurityUnusable, match=r"--traces-to: .* is invalid; allowed: http"):
        made(url)


def test_plain_text_stays_on_this_machine_unless_told_otherwise() -> None:
    with pytest.raises(SecurityUnusable, match="--insecure"):
        made("http://collector:4317")

    assert made("http://collector:4317", insecure=True) is not None


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(SecurityUnusable, match=r"pip install 'splitserve\[otel\]'"):
        made("http://localhost:4317")


ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, {module}
writers = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
print([name for name in sys.modules if name.startswith(writers)])
"""


# FastAPI has the interfaces of OpenTelemetry, which do nothing by themselves.
@pytest.mark.parametrize("module", ["scheduler_service.__main__", "splitserve_gateway.__main__"])
def test_sdk_is_not_imported_when_nobody_wants_traces(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        env={
            "PYTHONPATH": ":".join(
                str(ROOT / each) for each in (".", "common", "protos", "clients")
            )
        },
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout == "[]\n"
