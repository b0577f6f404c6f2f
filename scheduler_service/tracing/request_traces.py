"""Implements `Observer` with spans, of those requests that are sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import grpc.aio
import numpy as np
from opentelemetry.trace import Span

from scheduler_service.assignment import Assignment
from scheduler_service.callers.quotas import num_computed_outputs
from scheduler_service.core.notes import Began, KvLost, Note, Preempted, SwappedIn
from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.observer import NoObserver
from scheduler_service.scheduler.effects import AcquittalReason, MoveReason
from scheduler_service.tracing.request_trace import AnsweredStep, RequestTrace
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_tracing.trace_context import NO_CONTEXT, TraceContext
from splitserve_tracing.tracing import Attributes, Tracing

SERVICE = "splitserve-scheduler"
# Of a caller that is gone before its request has ended.
_ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a step is a traced request's."""

    trace: RequestTrace
    num_tokens: int
    phase: Span | None


@dataclass(frozen=True, slots=True)
class _SentStep:
    num_rows: int
    num_tokens: int
    sent_ns: int
    parts: Sequence[_Part]


class RequestTraces(NoObserver):
    """Used in the event loop. Requests are known by their `client_key`."""

    def __init__(self, tracing: Tracing, now_ns: Callable[[], int] = time.time_ns) -> None:
        """`now_ns`: nanoseconds since 1970."""
        self._tracing = tracing
        self._now_ns = now_ns
        self._traces: dict[int, RequestTrace] = {}
        # Those whose next token is news.
        self._awaiting: set[int] = set()
        # By address: rows of traced requests, and steps without an answer that have some.
        self._rows: dict[str, dict[int, RequestTrace]] = {}
        self._steps: dict[str, dict[int, _SentStep]] = {}

    @property
    def num_open(self) -> int:
        """Requests that are traced and have not ended."""
        return len(self._traces)

    def begin(
        self,
        request: Request,
        request_id: str,
        message: api.GenerateRequest,
        context: grpc.aio.ServicerContext | None,
        *,
        is_of_gateway: bool = False,
    ) -> str:
        """`request`, which its caller calls `request_id`, is about to be submitted.

        `message` brought it, in a call of its own if there is a `context`. `is_of_gateway`: by the
        key of one, which has decided whether there is a trace. Returns the id of that; empty if
        there is none.
        """
        received = _received(message, context)
        attributes: Attributes = {
            "splitserve.request_id": request_id,
            "splitserve.tenant": request.scheduling.tenant,
            "splitserve.num_sequences": request.params.num_sequences,
            "gen_ai.usage.input_tokens": request.sequences[0].num_prompt_tokens,
        }
        span, _ = self._tracing.begin(
            received, "generate", attributes, self._now_ns(), is_decided=is_of_gateway
        )
        if span is None:
            return ""
        trace = RequestTrace(self._tracing, span, self._now_ns)
        if num_resumed_tokens := sum(each.num_output_tokens for each in request.sequences):
            trace.resumed(num_resumed_tokens)
        self._traces[request.client_key] = trace
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Sends what has not been sent yet, within seconds. It blocks."""
        self._tracing.close()

    def refused(self, request: Request, reason: str) -> None:
        """It was not taken after all."""
        trace = self._traces.pop(request.client_key, None)
        if trace is not None:
            trace.end({"splitserve.refusal": reason}, reason)

    def request_ended(self, request: Request) -> None:
        trace = self._traces.pop(request.client_key, None)
        if trace is None:
            return
        self._awaiting.discard(request.client_key)
        if not self._traces:
            self._rows.clear()
            self._steps.clear()
        finish = _ABANDONED if request.finish_reason is None else request.finish_reason.value
        attributes: Attributes = {
            "gen_ai.usage.output_tokens": num_computed_outputs(request),
            "splitserve.finish_reason": finish,
            "splitserve.num_cached_tokens": request.num_cached_tokens,
            "splitserve.num_preemptions": request.num_preemptions,
        }
        trace.end(attributes, "" if request.error is None else request.error[0])

    def request_given(self, request: Request, address: str, assignment: Assignment | None) -> None:
        if self._traces and (trace := self._traces.get(request.client_key)) is not None:
            attributes: dict[str, str | int] = {"splitserve.executor": address}
            if assignment is not None:
                attributes["splitserve.reason"] = assignment.why.value
                attributes["splitserve.num_cached_tokens"] = assignment.num_cached
            trace.note("given", attributes)

    def request_quarantined(self, request: Request) -> None:
        if self._traces and (trace := self._traces.get(request.client_key)) is not None:
            trace.note("quarantined", {"splitserve.num_trials": request.num_trials_left})

    def request_acquitted(self, request: Request, why: AcquittalReason) -> None:
        if self._traces and (trace := self._traces.get(request.client_key)) is not None:
            trace.note("acquitted", {"splitserve.reason": why.value})

    def request_taken_back(self, request: Request, address: str, why: MoveReason) -> None:
        if self._traces and (trace := self._traces.get(request.client_key)) is not None:
            trace.taken_back(address, why.value)
            self._await(request.client_key, trace)

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        if not self._traces:
            return
        for note in plan.notes:
            self._note(note, address)
        rows = self._rows_after(address, plan)
        work = plan.work
        parts = []
        for row_id, trace in rows.items():
            (found,) = np.nonzero(work.row_ids == row_id)
            if len(found):
                num_tokens = int(work.num_new_tokens[found[0]])
                parts.append(_Part(trace, num_tokens, trace.phase_span))
        if parts:
            sent = _SentStep(len(work.row_ids), plan.num_tokens, self._now_ns(), parts)
            self._steps.setdefault(address, {})[plan.step_id] = sent

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        steps = self._steps.get(address)
        sent = steps.pop(outcome.step_id, None) if steps else None
        if sent is None:
            return
        answered = AnsweredStep(
            outcome.step_id,
            address,
            sent.num_rows,
            sent.num_tokens,
            sent.sent_ns,
            self._now_ns(),
            outcome.status.value,
            outcome.move_us,
            outcome.compute_us,
        )
        for part in sent.parts:
            part.trace.step(answered, part.num_tokens, part.phase)

    def tokens_delivered(self, events: StepEvents) -> None:
        if not self._awaiting:
            return
        keys = self._awaiting.intersection(events.client_keys.tolist())
        keys |= self._awaiting.intersection(
            event.sequence.request.client_key for event in events.tokens
        )
        for key in keys:
            self._awaiting.discard(key)
            self._traces[key].got_token()

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        self._rows.pop(address, None)
        self._steps.pop(address, None)
        for request in requests if self._traces else ():
            trace = self._traces.get(request.client_key)
            if trace is not None:
                trace.left(address, is_lost=is_lost)
                self._await(request.client_key, trace)

    def _rows_after(self, address: str, plan: StepPlan) -> dict[int, RequestTrace]:
        """The rows of traced requests that an executor has with `plan`."""
        rows = self._rows.setdefault(address, {})
        if plan.base_step_id is None:
            rows.clear()
        for row_id in plan.removed_row_ids:
            rows.pop(row_id, None)
        for row in plan.new_rows:
            trace = self._traces.get(row.sequence.request.client_key)
            if trace is None:
                rows.pop(row.row_id, None)
                continue
            rows[row.row_id] = trace
        return rows

    def _note(self, note: Note, address: str) -> None:
        key = note.request.client_key
        trace = self._traces.get(key)
        if trace is None:
            return
        match note:
            case Began():
                trace.began(address, note.num_cached, note.num_on_host)
            case Preempted():
                trace.preempted(note.mode.value, note.cause.value)
            case SwappedIn():
                trace.swapped_in()
            case KvLost():
                trace.lost_kv()
            case _:
                assert_never(note)
        self._await(key, trace)

    def _await(self, key: int, trace: RequestTrace) -> None:
        if trace.awaits_token:
            self._awaiting.add(key)
        else:
            self._awaiting.discard(key)


def _received(
    message: api.GenerateRequest, context: grpc.aio.ServicerContext | None
) -> TraceContext:
    """What a caller says of its trace: in its request, or with the call that is only about it."""
    if message.traceparent:
        return TraceContext.received([message.traceparent], [message.tracestate])
    if context is None:
        return NO_CONTEXT
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in context.invocation_metadata() or ():
        if name in found and isinstance(value, str):
            found[name].append(value)
    return TraceContext.received(found["traceparent"], found["tracestate"])
