"""Trace of one request: a span of the whole request, spans of its phases, and of some steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from opentelemetry.trace import Span

from splitserve_tracing.tracing import Attributes, Tracing

# Maximum number of child spans of a request; further ones are only counted.
MAX_CHILDREN = 64


class TracePhase(Enum):
    """Phases of a request in a trace.

    QUEUE: waits to begin. RESUME: computes its KV again, or was swapped in. RECOVERY: from the loss
    of the executor to the next token, wherever that token is computed. MOVE: same as RECOVERY,
    after the request left an executor that still serves.
    """

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RESUME = "resume"
    RECOVERY = "recovery"
    MOVE = "move"


_WAITING = frozenset({TracePhase.QUEUE, TracePhase.PREEMPTED})
_UNTIL_A_TOKEN = frozenset(
    {TracePhase.PREFILL, TracePhase.RESUME, TracePhase.RECOVERY, TracePhase.MOVE}
)


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """Step with its result. `sent_ns`, `answered_ns`: nanoseconds since 1970.

    `status`, `move_us` and `compute_us` are None if only the first part of the result is there.
    """

    step_id: int
    executor: str
    num_rows: int
    num_tokens: int
    sent_ns: int
    answered_ns: int
    status: str | None = None
    move_us: int | None = None
    compute_us: int | None = None


class RequestTrace:
    """Spans of one request. `span`: the whole request. Used only in the event loop."""

    def __init__(self, tracing: Tracing, span: Span, now_ns: Callable[[], int]) -> None:
        self.span = span
        self._tracing = tracing
        self._now_ns = now_ns
        self._num_children = 0
        self._num_left_out = 0
        self._num_steps = 0
        self._compute_us = 0
        self._has_tokens = False
        self.phase = TracePhase.QUEUE
        self.phase_span: Span | None = self._child(TracePhase.QUEUE.value, {})

    @property
    def awaits_token(self) -> bool:
        """Whether the request is being computed and its next token begins another phase."""
        return self.phase in _UNTIL_A_TOKEN

    def note(self, event: str, attributes: Attributes) -> None:
        """Adds an event to the span of the request."""
        self.span.add_event(event, attributes, self._now_ns())

    def resumed(self, num_tokens: int) -> None:
        """Notes that the request came with `num_tokens` output tokens of an earlier attempt."""
        self._has_tokens = True
        self.note("resumed", {"splitserve.num_resumed_tokens": num_tokens})

    def began(self, executor: str, num_cached: int, num_on_host: int) -> None:
        """Notes that the request got rows at an executor.

        `num_cached`: tokens that need not be computed. `num_on_host`: of these, tokens from the
        host pool.
        """
        found: Attributes = {
            "splitserve.executor": executor,
            "splitserve.num_cached_tokens": num_cached,
            "splitserve.num_host_tokens": num_on_host,
        }
        if self.phase in _WAITING:
            self._enter(TracePhase.RESUME if self._has_tokens else TracePhase.PREFILL, found)
        elif self.phase_span is not None:
            self.phase_span.add_event("began", found, self._now_ns())

    def swapped_in(self) -> None:
        """Notes that the blocks of the request come back from the host pool."""
        self.note("swapped_in", {})
        self._enter(TracePhase.RESUME, {})

    def lost_kv(self) -> None:
        """Notes that a step failed that the request depended on.

        The request waits to be computed again.
        """
        self.note("kv_lost", {})
        self._enter(TracePhase.QUEUE, {})

    def taken_back(self, executor: str, why: str) -> None:
        """Notes that the request left an executor that still serves, and waits for another one."""
        where: Attributes = {"splitserve.executor": executor, "splitserve.reason": why}
        self.note("taken_back", where)
        if self.phase is not TracePhase.QUEUE:
            self._enter(TracePhase.MOVE, where)

    def got_token(self) -> None:
        """Notes that a token was delivered to the client."""
        if not self._has_tokens:
            self._has_tokens = True
            self.note("first_token", {})
        if self.awaits_token:
            self._enter(TracePhase.DECODE, {})

    def preempted(self, mode: str, cause: str) -> None:
        """Notes that the request gave up its rows."""
        why = {"splitserve.preemption.mode": mode, "splitserve.preemption.cause": cause}
        self.note("preempted", why)
        self._enter(TracePhase.PREEMPTED, why)

    def left(self, executor: str, *, is_lost: bool) -> None:
        """Notes that the executor of the request is gone, along with the computed KV."""
        where: Attributes = {"splitserve.executor": executor}
        self.note("executor_lost" if is_lost else "executor_left", where)
        if self.phase is TracePhase.QUEUE:
            return  # the executor has computed nothing for the request
        if is_lost and self.phase_span is not None:
            self._tracing.fail(self.phase_span, "the executor was lost")
        self._enter(TracePhase.RECOVERY if is_lost else TracePhase.MOVE, where)

    def count_steps(self, num_steps: int, compute_us: int) -> None:
        """Adds to the number of steps that computed the request, and to their compute time."""
        self._num_steps += num_steps
        self._compute_us += compute_us

    def step(self, step: AnsweredStep, num_tokens: int, phase: Span | None) -> None:
        """Adds a span of a step that computed `num_tokens` tokens of the request.

        Adds none if the phase has changed since the step was sent. `phase`: span of the phase in
        which the step was sent; None if there were too many spans.
        """
        if phase is None or phase is not self.phase_span or not self.awaits_token:
            return
        found: dict[str, str | int | None] = {
            "splitserve.step_id": step.step_id,
            "splitserve.executor": step.executor,
            "splitserve.step.status": step.status,
            "splitserve.step.num_rows": step.num_rows,
            "splitserve.step.num_tokens": step.num_tokens,
            "splitserve.request.num_tokens": num_tokens,
            "splitserve.step.move_us": step.move_us,
            "splitserve.step.compute_us": step.compute_us,
        }
        attributes: Attributes = {key: each for key, each in found.items() if each is not None}
        span = self._child("step", attributes, phase, step.sent_ns)
        if span is not None:
            span.end(step.answered_ns)

    def end(self, attributes: Attributes, error: str = "") -> None:
        """Ends all spans. `error`: reason if the request ended with an error, else empty."""
        self._end_phase()
        counts = {
            "splitserve.num_steps": self._num_steps,
            "splitserve.compute_us": self._compute_us,
            "splitserve.num_spans_left_out": self._num_left_out,
        }
        self.span.set_attributes({**attributes, **counts})
        if error:
            self._tracing.fail(self.span, error)
        self.span.end(self._now_ns())

    def _enter(self, phase: TracePhase, attributes: Attributes) -> None:
        self._end_phase()
        self.phase = phase
        self.phase_span = self._child(phase.value, attributes)

    def _end_phase(self) -> None:
        if self.phase_span is not None:
            self.phase_span.end(self._now_ns())

    def _child(
        self,
        name: str,
        attributes: Attributes,
        parent: Span | None = None,
        start_ns: int | None = None,
    ) -> Span | None:
        if self._num_children == MAX_CHILDREN:
            self._num_left_out += 1
            return None
        self._num_children += 1
        start_ns = self._now_ns() if start_ns is None else start_ns
        return self._tracing.child(parent or self.span, name, attributes, start_ns)
