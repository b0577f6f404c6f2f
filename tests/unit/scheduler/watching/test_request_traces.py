"""Tests the spans of a request, and the steps counted for it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_service.scheduler.values import (
    BlockMoves,
    NewRow,
    Request,
    RowWork,
    SamplingParams,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrites,
)
from scheduler_service.watching.request_trace import MAX_CHILDREN, AnsweredStep, RequestTrace
from scheduler_service.watching.request_traces import TracedRows
from splitserve_tracing import NO_CONTEXT, TraceConfig
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


@contextmanager
def traced(clock: Iterator[int]) -> Iterator[tuple[RequestTrace, list[ReadableSpan]]]:
    """A trace that ends with the context; its spans are in the list afterwards."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(TraceConfig("http://localhost:1", 1.0), "test", exporter)
    whole, _ = tracing.begin(NO_CONTEXT, "generate", {}, next(clock))
    assert whole is not None
    trace = RequestTrace(tracing, whole, clock.__next__)
    spans: list[ReadableSpan] = []
    yield trace, spans
    trace.end({})
    tracing.close()
    spans += exporter.get_finished_spans()


def spans_after(happenings: list[str]) -> list[ReadableSpan]:
    clock = itertools.count(1000, 10)
    with traced(clock) as (trace, spans):
        for what in happenings:
            let_happen(trace, what, next(clock))
    return spans


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


NUM_ROWS = 3
COMPUTE_US = 5
EMPTY = np.empty(0, np.int32)
ROWS = st.sets(st.integers(0, NUM_ROWS - 1))


@dataclass(slots=True, eq=False)
class CountedTrace:
    """As much of a RequestTrace as a request needs that decodes."""

    num_steps: int = 0
    compute_us: int = 0
    awaits_token: bool = False

    def count_steps(self, num_steps: int, compute_us: int) -> None:
        self.num_steps += num_steps
        self.compute_us += compute_us


class Executor:
    """Rows that change hands while steps are in flight. Requests with an even key are traced."""

    def __init__(self) -> None:
        self.rows = TracedRows("executor:1")
        self.traces: dict[int, Any] = {}
        self.expected: Counter[int] = Counter()
        self._owners: dict[int, int] = {}
        self._in_flight: list[tuple[int, list[int]]] = []
        self._last_step_id = 0
        self._last_key = 0

    def send(
        self, new_rows: set[int], working: set[int], trace: RequestTrace | None = None
    ) -> None:
        """Gives rows to new requests, and computes those of `working` that are taken.

        `trace`: of the new requests that are traced; None for one of each that only counts.
        """
        found = [self._new_row(row_id, trace) for row_id in sorted(new_rows)]
        row_ids = sorted(row_id for row_id in working if row_id in self._owners)
        keys = [self._owners[row_id] for row_id in row_ids]
        ones = np.ones(len(row_ids), np.int32)
        stays = np.array(keys, np.int64)
        work = RowWork(np.array(row_ids, np.int64), stays, ones, ones, ones, EMPTY, None)
        writes = TableWrites(EMPTY, EMPTY, EMPTY, EMPTY)
        step_id = self._last_step_id = self._last_step_id + 1
        plan = StepPlan(step_id, step_id - 1, (), found, writes, BlockMoves(), work)
        self.rows.sent(plan, self.traces, 0)
        self._in_flight.append((step_id, keys))

    def tell_part(self) -> None:
        """Has a part come of the oldest step in flight, if there is one."""
        if self._in_flight:
            self.rows.progressed(self._in_flight[0][0], 0)

    def answer(self) -> None:
        """Answers the oldest step in flight, if there is one."""
        if self._in_flight:
            step_id, keys = self._in_flight.pop(0)
            self.rows.answered(StepOutcome(step_id, StepStatus.OK, compute_us=COMPUTE_US), 0)
            self.expected.update(keys)

    def end_all(self) -> None:
        """Ends all traced requests, as long as nothing is in flight."""
        for trace in self.traces.values():
            self.rows.ended(trace)

    def _new_row(self, row_id: int, trace: RequestTrace | None) -> NewRow:
        self._last_key += 1
        key = self._last_key
        request = Request.create(f"r{key}", [1], SamplingParams(), arrival=key, seed=key)
        request.client_key = self._owners[row_id] = key
        if key % 2 == 0:
            self.traces[key] = trace or CountedTrace()
        return NewRow(request.sequence, row_id, EMPTY, EMPTY)


WORK = st.tuples(ROWS, ROWS)
HAPPENING = st.one_of(st.sampled_from(["answer", "part"]), WORK)


@given(st.lists(HAPPENING, max_size=30))
def test_traced_rows_count_steps_of_each_request(
    happenings: list[str | tuple[set[int], set[int]]],
) -> None:
    executor = Executor()
    for happening in happenings:
        if happening == "answer":
            executor.answer()
        elif happening == "part":
            executor.tell_part()
        else:
            assert isinstance(happening, tuple)
            executor.send(*happening)
    for _ in happenings:
        executor.answer()
    executor.end_all()

    for key, trace in executor.traces.items():
        assert trace.num_steps == executor.expected[key]
        assert trace.compute_us == COMPUTE_US * executor.expected[key]


def test_step_counts_for_a_request_that_ends_with_a_part_of_its_result() -> None:
    executor = Executor()
    executor.send({0, 1}, {0, 1})  # only the request of row 1 is traced
    executor.tell_part()
    executor.tell_part()
    executor.end_all()

    assert executor.traces[2].num_steps == 1


def test_first_token_in_a_part_has_the_span_of_its_step() -> None:
    executor = Executor()
    with traced(itertools.count(1000, 10)) as (trace, spans):
        trace.began("a:1", 0, 0)
        executor.send({0, 1}, {0, 1}, trace)
        executor.tell_part()
        trace.got_token()
        executor.answer()

    (step,) = (span for span in spans if span.name == "step")
    assert step.attributes is not None
    assert "splitserve.step.compute_us" not in step.attributes
    assert step.attributes["splitserve.step.num_rows"] == 2
