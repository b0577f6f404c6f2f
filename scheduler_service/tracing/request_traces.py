"""Spans of sampled requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

import grpc.aio

from scheduler_service.assignment import Assignment
from scheduler_service.callers.quotas import num_computed_outputs
from scheduler_service.core.notes import Began, KvLost, Note, Preempted, SwappedIn
from scheduler_service.core.plan import StepEvents, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.scheduler.effects import (
    DeliverTokens,
    Effect,
    ExecutorGone,
    RequestAcquitted,
    RequestAssigned,
    RequestFinished,
    RequestMoved,
    RequestQuarantined,
    SendStep,
)
from scheduler_service.tracing.request_trace import RequestTrace
from scheduler_service.tracing.traced_rows import TracedRows
from scheduler_service.watching.turn import Turn
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_tracing.trace_context import NO_CONTEXT, TraceContext
from splitserve_tracing.tracing import Attributes, Tracing

SERVICE = "splitserve-scheduler"
# Of a caller that is gone before its request has ended.
_ABANDONED = "abandoned"


class RequestTraces:
    """Open traces of requests, which are known by their `client_key`. Implements `Watcher`."""

    def __init__(self, tracing: Tracing, now_ns: Callable[[], int] = time.time_ns) -> None:
        """`now_ns`: nanoseconds since 1970."""
        self._tracing = tracing
        self._now_ns = now_ns
        self._traces: dict[int, RequestTrace] = {}
        # Those whose next token is news.
        self._awaiting: set[int] = set()
        # By address of the executor.
        self._rows: dict[str, TracedRows] = {}

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

    def see(self, turn: Turn) -> None:
        if not self._traces:
            return
        if (answered := turn.answered) is not None:
            rows = self._rows.get(answered.address)
            if rows is not None:
                rows.answered(answered.outcome, self._now_ns())
        for effect in turn.effects:
            if isinstance(effect, SendStep):
                self._step_sent(effect.address, effect.plan)
            elif isinstance(effect, DeliverTokens):
                self._delivered(effect.events)
            elif isinstance(effect, RequestFinished):
                self._ended(effect.request)
            elif isinstance(effect, ExecutorGone):
                self._executor_gone(effect)
            else:
                self._see_of_request(effect)

    def _see_of_request(self, effect: Effect) -> None:
        match effect:
            case RequestAssigned(request, address, assignment):
                if (trace := self._traces.get(request.client_key)) is not None:
                    _note_assigned(trace, address, assignment)
            case RequestMoved(request, address, reason):
                if (trace := self._traces.get(request.client_key)) is not None:
                    trace.taken_back(address, reason.value)
                    self._await(request.client_key, trace)
            case RequestQuarantined(request):
                if (trace := self._traces.get(request.client_key)) is not None:
                    trace.note("quarantined", {"splitserve.num_trials": request.num_trials_left})
            case RequestAcquitted(request, why):
                if (trace := self._traces.get(request.client_key)) is not None:
                    trace.note("acquitted", {"splitserve.reason": why.value})

    def _ended(self, request: Request) -> None:
        trace = self._traces.pop(request.client_key, None)
        if trace is None:
            return
        self._awaiting.discard(request.client_key)
        for rows in self._rows.values():
            rows.ended(trace)
        if not self._traces:
            self._rows.clear()
        finish = _ABANDONED if request.finish_reason is None else request.finish_reason.value
        attributes: Attributes = {
            "gen_ai.usage.output_tokens": num_computed_outputs(request),
            "splitserve.finish_reason": finish,
            "splitserve.num_cached_tokens": request.num_cached_tokens,
            "splitserve.num_preemptions": request.num_preemptions,
        }
        trace.end(attributes, "" if request.error is None else request.error[0])

    def _step_sent(self, address: str, plan: StepPlan) -> None:
        if not self._traces:
            return
        for note in plan.notes:
            self._note(note, address)
        rows = self._rows.get(address)
        if rows is None:
            rows = self._rows[address] = TracedRows(address)
        rows.sent(plan, self._traces.get, self._now_ns())

    def _delivered(self, events: StepEvents) -> None:
        if self._awaiting:
            self._tokens_delivered(events)
        for request in events.finished:
            self._ended(request)

    def _tokens_delivered(self, events: StepEvents) -> None:
        keys = self._awaiting.intersection(events.client_keys.tolist())
        keys |= self._awaiting.intersection(
            event.sequence.request.client_key for event in events.tokens
        )
        for key in keys:
            self._awaiting.discard(key)
            self._traces[key].got_token()

    def _executor_gone(self, gone: ExecutorGone) -> None:
        rows = self._rows.pop(gone.address, None)
        if rows is not None:
            rows.close()
        if gone.cause is LossCause.WITHDRAWN:
            return  # its requests have moved before
        for request in gone.requests:
            trace = self._traces.get(request.client_key)
            if trace is not None:
                trace.left(gone.address, is_lost=gone.cause is not LossCause.BLAMELESS)
                self._await(request.client_key, trace)

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


def _note_assigned(trace: RequestTrace, address: str, assignment: Assignment) -> None:
    attributes: Attributes = {
        "splitserve.executor": address,
        "splitserve.reason": assignment.why.value,
        "splitserve.num_cached_tokens": assignment.num_cached,
    }
    trace.note("given", attributes)


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
