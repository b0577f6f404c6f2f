"""Traces of sampled requests: the rows that these have at executors, and a watcher of turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

import grpc.aio
import numpy as np
from opentelemetry.trace import Span

from scheduler_service.callers import num_computed_outputs
from scheduler_service.scheduler import (
    DeliverTokens,
    Effect,
    ExecutorGone,
    LossCause,
    RequestAcquitted,
    RequestAssigned,
    RequestFinished,
    RequestMoved,
    RequestQuarantined,
    SendStep,
)
from scheduler_service.scheduler.values import (
    Assignment,
    Int64Array,
    KvLost,
    NewRow,
    Note,
    Preempted,
    Request,
    RowWork,
    StartedRequest,
    StepEvents,
    StepOutcome,
    StepPlan,
    SwappedIn,
)
from scheduler_service.watching.request_trace import AnsweredStep, RequestTrace
from scheduler_service.watching.transition import Transition, finish_reason_of
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_tracing import NO_CONTEXT, TraceContext
from splitserve_tracing.tracing import Attributes, Tracing

_NO_STAY = -1


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a step that belongs to a traced request that awaits a token."""

    trace: RequestTrace
    num_tokens: int
    phase: Span | None


@dataclass(slots=True)
class _SentStep:
    """Step that was sent and has no result yet.

    `left`: traces that lost a row of the step since then. `is_counted`: a part of its result came,
    and with it the step was counted.
    """

    work: RowWork
    num_tokens: int
    sent_ns: int
    parts: list[_Part]
    left: list[RequestTrace] = field(default_factory=list)
    is_counted: bool = False


class TracedRows:
    """Rows of the executor at `address` that belong to traced requests.

    The cost of a step hardly depends on the number of rows that only decode.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._owners: dict[int, RequestTrace] = {}
        self._row_ids: dict[RequestTrace, list[int]] = {}
        # By row id: traces whose next token begins another phase.
        self._awaiting: dict[int, RequestTrace] = {}
        self._steps: dict[int, _SentStep] = {}
        # By row id, for the current stay: its id, number of steps, and their compute time.
        self._stay_ids: Int64Array = np.empty(0, np.int64)
        self._num_steps: Int64Array = np.empty(0, np.int64)
        self._compute_us: Int64Array = np.empty(0, np.int64)

    def sent(self, plan: StepPlan, traces: Mapping[int, RequestTrace], now_ns: int) -> None:
        """Notes a step that was sent. `traces`: of requests, by client key."""
        for row in plan.new_rows:
            self._take_row(row, traces.get(row.sequence.request.client_key))
        if not self._owners:
            return
        work = plan.work
        self._see_stays(work)
        parts = [
            _Part(trace, int(work.num_new_tokens[index]), trace.phase_span)
            for index, trace in self._find_awaiting(work)
        ]
        self._steps[plan.step_id] = _SentStep(work, plan.num_tokens, now_ns, parts)

    def progressed(self, step_id: int, now_ns: int) -> None:
        """Counts a step, and adds its span, when the first part of its result is there.

        Its compute time is counted when it is answered, for traces that have not ended by then.
        """
        sent = self._steps.get(step_id)
        if sent is None or sent.is_counted:
            return
        self._count(sent, 0)
        sent.is_counted = True
        self._add_spans(step_id, sent, now_ns)

    def answered(self, outcome: StepOutcome, now_ns: int) -> None:
        """Counts a step for its rows, and adds its span to the traces that awaited a token."""
        sent = self._steps.pop(outcome.step_id, None)
        if sent is None:
            return
        self._count(sent, outcome.compute_us)
        if not sent.is_counted:
            self._add_spans(outcome.step_id, sent, now_ns, outcome)

    def _count(self, sent: _SentStep, compute_us: int) -> None:
        work, num_steps = sent.work, 0 if sent.is_counted else 1
        row_ids = work.row_ids[self._stay_ids[work.row_ids] == work.stay_ids]
        self._num_steps[row_ids] += num_steps
        self._compute_us[row_ids] += compute_us
        for trace in sent.left:
            trace.count_steps(num_steps, compute_us)

    def _add_spans(
        self, step_id: int, sent: _SentStep, now_ns: int, outcome: StepOutcome | None = None
    ) -> None:
        if not sent.parts:
            return
        num_rows = len(sent.work.row_ids)
        step = AnsweredStep(step_id, self._address, num_rows, sent.num_tokens, sent.sent_ns, now_ns)
        if outcome is not None:
            status, move_us = outcome.status.value, outcome.move_us
            step = replace(step, status=status, move_us=move_us, compute_us=outcome.compute_us)
        for part in sent.parts:
            part.trace.step(step, part.num_tokens, part.phase)

    def ended(self, trace: RequestTrace) -> None:
        """Moves the counts of a trace's rows into the trace, and forgets the trace."""
        for row_id in self._row_ids.pop(trace, ()):
            self._settle(row_id, trace)
            del self._owners[row_id]
            self._awaiting.pop(row_id, None)
        if not self._owners:
            self._steps.clear()

    def close(self) -> None:
        """Moves the counts of all rows into their traces, when the executor is gone."""
        for row_id, trace in self._owners.items():
            self._settle(row_id, trace)

    def _take_row(self, row: NewRow, trace: RequestTrace | None) -> None:
        row_id = row.row_id
        before = self._owners.pop(row_id, None)
        if before is not None:
            self._leave(row_id, before)
        if row_id < len(self._stay_ids):
            self._stay_ids[row_id] = _NO_STAY
            self._num_steps[row_id] = self._compute_us[row_id] = 0
        if trace is None:
            return
        self._owners[row_id] = trace
        self._row_ids.setdefault(trace, []).append(row_id)
        if trace.awaits_token:
            self._awaiting[row_id] = trace

    def _leave(self, row_id: int, trace: RequestTrace) -> None:
        """Takes a row from a trace. Steps in flight that have the row still count for the trace."""
        self._settle(row_id, trace)
        self._awaiting.pop(row_id, None)
        row_ids = self._row_ids[trace]
        row_ids.remove(row_id)
        if not row_ids:
            del self._row_ids[trace]
        if row_id < len(self._stay_ids):
            stay_id = int(self._stay_ids[row_id])
            for step in self._steps.values():
                if stay_id in step.work.stay_ids:
                    step.left.append(trace)

    def _settle(self, row_id: int, trace: RequestTrace) -> None:
        if row_id < len(self._num_steps):
            trace.count_steps(int(self._num_steps[row_id]), int(self._compute_us[row_id]))
            self._num_steps[row_id] = self._compute_us[row_id] = 0

    def _find_awaiting(self, work: RowWork) -> list[tuple[int, RequestTrace]]:
        """Returns (index in the step, trace) of the rows whose traces await a token."""
        found = []
        for row_id, trace in list(self._awaiting.items()):
            if not trace.awaits_token:
                del self._awaiting[row_id]
                continue
            (indexes,) = (work.row_ids == row_id).nonzero()
            if len(indexes):
                found.append((int(indexes[0]), trace))
        return found

    def _see_stays(self, work: RowWork) -> None:
        most = int(work.row_ids.max()) + 1 if len(work.row_ids) else 0
        num_more = most - len(self._stay_ids)
        if num_more > 0:
            none = np.zeros(num_more, np.int64)
            self._stay_ids = np.append(self._stay_ids, np.full(num_more, _NO_STAY))
            self._num_steps = np.append(self._num_steps, none)
            self._compute_us = np.append(self._compute_us, none)
        changed = (self._stay_ids[work.row_ids] != work.stay_ids).nonzero()[0]
        if len(changed):
            row_ids = work.row_ids[changed]
            self._num_steps[row_ids] = self._compute_us[row_ids] = 0
            self._stay_ids[row_ids] = work.stay_ids[changed]


SERVICE = "splitserve-scheduler"


class RequestTraces:
    """Open traces of requests, by client key. Implements `Watcher`."""

    def __init__(self, tracing: Tracing, now_ns: Callable[[], int] = time.time_ns) -> None:
        """`now_ns`: wall clock, in nanoseconds since 1970."""
        self._tracing = tracing
        self._now_ns = now_ns
        self._traces: dict[int, RequestTrace] = {}
        # Client keys of requests whose next token begins another phase.
        self._awaiting: set[int] = set()
        # Rows of traced requests, by executor address.
        self._rows: dict[str, TracedRows] = {}

    @property
    def num_open(self) -> int:
        """Number of unfinished requests with a trace."""
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
        """Begins the trace of a request that is about to be submitted, if the request is sampled.

        `request_id`: the caller's id. `message`: the submitted message, sent in a call of its own
        if there is a `context`. `is_of_gateway`: the call has the key of a gateway, which has
        already decided whether there is a trace. Returns the id of the trace; empty if there is
        none.
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
        """Sends the remaining spans, for a few seconds at most. Blocks."""
        self._tracing.close()

    def refused(self, request: Request, reason: str) -> None:
        """Ends the trace of a request that was refused."""
        trace = self._traces.pop(request.client_key, None)
        if trace is not None:
            trace.end({"splitserve.refusal": reason}, reason)

    def see(self, turn: Transition) -> None:
        if not self._traces:
            return
        self._see_result(turn)
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

    def _see_result(self, turn: Transition) -> None:
        if (answered := turn.answered) is not None:
            rows = self._rows.get(answered.address)
            if rows is not None:
                rows.answered(answered.outcome, self._now_ns())
        if (progressed := turn.progressed) is not None:
            rows = self._rows.get(progressed.address)
            if rows is not None:
                rows.progressed(progressed.part.step_id, self._now_ns())

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
        attributes: Attributes = {
            "gen_ai.usage.output_tokens": num_computed_outputs(request),
            "splitserve.finish_reason": finish_reason_of(request),
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
        rows.sent(plan, self._traces, self._now_ns())

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
            return  # `RequestMoved` came before
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
            case StartedRequest():
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
    trace.note("assigned", attributes)


def _received(
    message: api.GenerateRequest, context: grpc.aio.ServicerContext | None
) -> TraceContext:
    """Returns the trace context of a request, from its message or the metadata of its own call."""
    if message.traceparent:
        return TraceContext.received([message.traceparent], [message.tracestate])
    if context is None:
        return NO_CONTEXT
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in context.invocation_metadata() or ():
        if name in found and isinstance(value, str):
            found[name].append(value)
    return TraceContext.received(found["traceparent"], found["tracestate"])
