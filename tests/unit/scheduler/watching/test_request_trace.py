"""The spans of one request, whatever happens to it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_service.watching.request_trace import MAX_CHILDREN, AnsweredStep, RequestTrace
from splitserve_tracing.trace_config import NO_CONTEXT, TraceConfig
from splitserve_tracing.tracing import Tracing

HAPPENINGS = st.sampled_from(
    ["began", "token", "preempted", "swapped_in", "lost_kv", "lost", "left", "taken_back", "step"]
)


def step_of(now_ns: int) -> AnsweredStep:
    return AnsweredStep(1, "a:1", 4, 9, now_ns, now_ns + 1, "ok", 2, 3)


def let_happen(trace: RequestTrace, what: str, now_ns: int) -> None:
    match what:
        case "began":
            trace.began("a:1", 1, 0)
        case "token":
            trace.got_token()
        case "preempted":
            trace.preempted("swap", "blocks")
        case "swapped_in":
            trace.swapped_in()
        case "lost_kv":
            trace.lost_kv()
        case "lost" | "left":
            trace.left("a:1", is_lost=what == "lost")
        case "taken_back":
            trace.taken_back("a:1", "drained")
        case "step":
            trace.step(step_of(now_ns), 2, trace.phase_span)
            trace.count_steps(1, 3)


def spans_after(happenings: list[str]) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(TraceConfig("http://localhost:1", 1.0), "test", exporter)
    clock = itertools.count(1000, 10)
    whole, _ = tracing.begin(NO_CONTEXT, "generate", {}, next(clock))
    assert whole is not None
    trace = RequestTrace(tracing, whole, clock.__next__)
    for what in happenings:
        let_happen(trace, what, next(clock))
    trace.end({})
    tracing.close()
    return list(exporter.get_finished_spans())


@given(st.lists(HAPPENINGS, max_size=200))
def test_spans_all_end_within_the_request_and_are_bounded(happenings: list[str]) -> None:
    spans = spans_after(happenings)

    (whole,) = (span for span in spans if span.name == "generate")
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert len(spans) <= MAX_CHILDREN + 1
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time
    phases = [span for span in spans if span.name not in ("generate", "step")]
    phases.sort(key=lambda span: span.start_time or 0)
    assert all(a.end_time <= b.start_time for a, b in itertools.pairwise(phases))  # type: ignore[operator]


def test_what_is_left_out_is_counted() -> None:
    spans = spans_after(["began", *["preempted", "swapped_in"] * 50])

    (whole,) = (span for span in spans if span.name == "generate")
    assert whole.attributes is not None
    # Queue, prefill and a hundred more.
    assert whole.attributes["splitserve.num_spans_left_out"] == 102 - MAX_CHILDREN


def test_steps_of_decodes_are_only_counted() -> None:
    spans = spans_after(["began", "step", "token", "step", "step"])

    assert len([span for span in spans if span.name == "step"]) == 1
    (whole,) = (span for span in spans if span.name == "generate")
    assert whole.attributes is not None
    assert whole.attributes["splitserve.num_steps"] == 3
    assert whole.attributes["splitserve.compute_us"] == 9
