"""Prometheus metrics of the scheduler: token gaps, request times, step times, and audit counts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from scheduler_service.audit import (
    Audit,
    AuditEvent,
    CallerRefused,
    ExecutorDrained,
    ExecutorLost,
    ExecutorRefused,
    ExecutorRegistered,
    ExecutorWithdrawn,
    RequestAdmitted,
    RequestEnded,
    RequestQuarantined,
    RequestRefused,
)
from scheduler_service.scheduler import (
    DeliverTokens,
    ExecutorGone,
    LossCause,
    RequestFinished,
    RequestSubmitted,
    SendStep,
)
from scheduler_service.scheduler.values import (
    FinishReason,
    Request,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
    TokenEvent,
)
from scheduler_service.watching.transition import Transition
from splitserve_adapters import name_of
from splitserve_metrics import BulkHistogram, BulkValues, Instruments
from splitserve_rpc import CODE_OF_REASON


@dataclass(slots=True, eq=False)
class _Cohort:
    """Requests whose latest tokens came at the same time.

    `keys`: client keys of the step that brought these tokens, as bytes. `last_ns`: time of the
    tokens. `members`: client keys of the requests.
    """

    keys: bytes
    last_ns: int
    members: set[int]


class TokenGaps:
    """Measures the time between tokens (inter-token latency) of requests of one sequence.

    Most rows get one token per step. While the same requests do so, all their gaps are equal, and a
    step costs the same however many they are. When requests come or go, sets are compared.
    """

    def __init__(self, gaps: BulkValues) -> None:
        """`gaps`: histogram of gaps in nanoseconds."""
        self._gaps = gaps
        self._cohort_of: dict[int, _Cohort] = {}
        # Cohorts that consist of all requests of a step, by the keys of that step.
        self._whole: dict[bytes, _Cohort] = {}

    def add(self, keys: npt.NDArray[np.int64], now_ns: int, known: Container[int]) -> list[int]:
        """Records one token for each item of `keys`; a key with several tokens is repeated.

        Returns the keys in `known` that had no token before, each once. Such a request has no gap
        yet, not even to further tokens of the same step. Several tokens of a request share the time
        since its previous token.
        """
        key_bytes = keys.tobytes()
        cohort = self._whole.get(key_bytes)
        if cohort is not None:
            self._gaps.repeat(now_ns - cohort.last_ns, len(keys))
            cohort.last_ns = now_ns
            return []
        all_keys = keys.tolist()
        key_set = set(all_keys)
        new = key_set.difference(self._cohort_of)
        firsts = [key for key in dict.fromkeys(all_keys) if key in new and key in known]
        if len(key_set) < len(all_keys):
            self._add_one_by_one(Counter(all_keys), now_ns)
            cohort, moved = _Cohort(key_bytes, now_ns, set()), key_set - new
        else:
            cohort, moved = self._add_together(key_set - new if new else key_set, now_ns)
        moved.update(firsts)
        cohort.members |= moved
        cohort.keys, cohort.last_ns = key_bytes, now_ns
        self._cohort_of.update(dict.fromkeys(moved, cohort))
        if len(cohort.members) == len(all_keys):
            self._whole[key_bytes] = cohort
        return firsts

    def _add_together(self, keys: set[int], now_ns: int) -> tuple[_Cohort, set[int]]:
        """Records one token for each request in `keys`, all of which had tokens before.

        Returns the cohort to reuse and the `keys` that have to become members of it. The cohort is
        the largest one whose members all got a token, so that few keys move.
        """
        largest, moved = _Cohort(b"", now_ns, set()), set[int]()
        rest = set(keys)
        while rest:
            before = self._cohort_of[next(iter(rest))]
            self._whole.pop(before.keys, None)
            common = rest & before.members
            self._gaps.repeat(now_ns - before.last_ns, len(common))
            rest -= common
            if len(common) < len(before.members):
                before.members -= common
                moved |= common
            elif len(common) > len(largest.members):
                moved |= largest.members
                largest = before
            else:
                moved |= common
        return largest, moved

    def _add_one_by_one(self, counts: Counter[int], now_ns: int) -> None:
        for key, num_tokens in counts.items():
            before = self._cohort_of.get(key)
            if before is not None:
                self._gaps.repeat((now_ns - before.last_ns) / num_tokens, num_tokens)
                self._leave(before, key)

    def _leave(self, cohort: _Cohort, key: int) -> None:
        cohort.members.discard(key)
        self._whole.pop(cohort.keys, None)

    def ended(self, key: int) -> None:
        """Forgets a request that gets no more tokens."""
        cohort = self._cohort_of.pop(key, None)
        if cohort is not None:
            self._leave(cohort, key)

    @property
    def num_remembered(self) -> int:
        """Number of remembered requests and cohorts."""
        return len(self._cohort_of) + len(self._whole)


_S = 1e9


@dataclass(slots=True)
class _Open:
    """Unfinished request.

    `last_ns`: time of the latest token of each sequence, if there are several.
    """

    submitted_ns: int
    has_begun: bool = False
    lost_ns: int | None = None
    last_ns: dict[int, int] = field(default_factory=dict)


class RequestTimes:
    """Measures the durations of requests. Requests are identified by `client_key`."""

    def __init__(self, instruments: Instruments) -> None:
        self._first_token = instruments.histogram("splitserve_time_to_first_token_seconds")
        self._queue = instruments.histogram("splitserve_queue_time_seconds")
        self._duration = instruments.histogram("splitserve_request_duration_seconds")
        self._recovery = instruments.histogram("splitserve_recovery_seconds")
        self._output_tokens = instruments.counter("splitserve_output_tokens_total")
        self.between_tokens = BulkHistogram(
            instruments.metric("splitserve_inter_token_latency_seconds"), 1 / _S
        )
        self._gaps = self.between_tokens.labels()
        self._open: dict[int, _Open] = {}
        # Token gaps of requests of one sequence.
        self._of_one = TokenGaps(self._gaps)
        self._recovering: set[int] = set()

    @property
    def num_remembered(self) -> int:
        """Number of remembered requests and cohorts."""
        return len(self._open) + self._of_one.num_remembered

    def submitted(self, request: Request, now_ns: int) -> None:
        """Begins the times of a request that was admitted."""
        self._open[request.client_key] = _Open(now_ns)

    def ended(self, request: Request, now_ns: int) -> None:
        """Records the duration of a request and forgets the request."""
        key = request.client_key
        known = self._open.pop(key, None)
        self._of_one.ended(key)
        self._recovering.discard(key)
        if known is not None:
            self._duration.observe((now_ns - known.submitted_ns) / _S)

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """Records the queue times of requests that get their first row with a step."""
        for row in plan.new_rows:
            known = self._open.get(row.sequence.request.client_key)
            if known is not None and not known.has_begun:
                known.has_begun = True
                self._queue.observe((now_ns - known.submitted_ns) / _S)

    def lost(self, requests: Iterable[Request], now_ns: int) -> None:
        """Begins the recovery times of requests whose executor is lost."""
        for request in requests:
            known = self._open.get(request.client_key)
            if known is not None and known.lost_ns is None:
                known.lost_ns = now_ns
                self._recovering.add(request.client_key)

    def delivered(self, events: StepEvents, now_ns: int) -> None:
        """Records tokens that were delivered to clients, and the ends of requests."""
        if len(events.client_keys):
            self._tokens_of_one(events.client_keys, now_ns)
        if events.tokens:
            # `tokens` also has the tokens of a request of one sequence that was just preempted.
            keys_and_indexes = [_key_and_index(token) for token in events.tokens]
            of_one = [key for key, index in keys_and_indexes if index is None]
            if of_one:
                self._tokens_of_one(np.array(of_one, np.int64), now_ns)
            for (key, index), num_tokens in Counter(keys_and_indexes).items():
                if index is not None:
                    self._tokens_of_several(key, index, num_tokens, now_ns)
        for request in events.finished:
            self.ended(request, now_ns)

    def _tokens_of_one(self, keys: npt.NDArray[np.int64], now_ns: int) -> None:
        """Records one token for each item of `keys`, requests of one sequence. Keys may repeat."""
        self._output_tokens.inc(len(keys))
        if self._recovering:
            for key in self._recovering.intersection(keys.tolist()):
                self._recovered(key, now_ns)
        for key in self._of_one.add(keys, now_ns, self._open):
            self._first_token.observe((now_ns - self._open[key].submitted_ns) / _S)

    def _tokens_of_several(self, key: int, index: int, num_tokens: int, now_ns: int) -> None:
        """Records `num_tokens` tokens of sequence `index` of a request with several sequences."""
        self._output_tokens.inc(num_tokens)
        known = self._open.get(key)
        if known is None:
            return
        self._recovered(key, now_ns)
        if not known.last_ns:
            self._first_token.observe((now_ns - known.submitted_ns) / _S)
        elif index in known.last_ns:
            self._gaps.repeat((now_ns - known.last_ns[index]) / num_tokens, num_tokens)
        known.last_ns[index] = now_ns

    def _recovered(self, key: int, now_ns: int) -> None:
        self._recovering.discard(key)
        known = self._open.get(key)
        if known is not None and known.lost_ns is not None:
            self._recovery.observe((now_ns - known.lost_ns) / _S)
            known.lost_ns = None


def _key_and_index(token: TokenEvent) -> tuple[int, int | None]:
    """Returns the client key of a token's request and its sequence index.

    The index is None if the request has one sequence.
    """
    sequence = token.sequence
    request = sequence.request
    return request.client_key, sequence.index if len(request.sequences) > 1 else None


_US, _NS = 1000, 1e-9


class StepTimes:
    """Measures durations and sizes of steps."""

    def __init__(self, instruments: Instruments) -> None:
        steps = instruments.counter("splitserve_steps_total")
        self._steps = {status: steps.labels(status.value) for status in StepStatus}
        durations = BulkHistogram(instruments.metric("splitserve_step_duration_seconds"), _NS)
        self._plan, self._round_trip, self._move, self._compute = (
            durations.labels(phase) for phase in ("plan", "round_trip", "move", "compute")
        )
        rows = BulkHistogram(instruments.metric("splitserve_step_rows"))
        tokens = BulkHistogram(instruments.metric("splitserve_step_tokens"))
        self._rows, self._tokens = rows.labels(), tokens.labels()
        self._histograms = durations, rows, tokens
        # Send times of steps without a result, by executor address, oldest first.
        self._sent_ns: dict[str, deque[int]] = {}

    def families(self) -> list[HistogramMetricFamily]:
        """Returns the current histograms."""
        return [histogram.family() for histogram in self._histograms]

    def sent(self, address: str, plan: StepPlan, planning_ns: int, now_ns: int) -> None:
        """Records a step that was sent to the executor at `address`. Times are nanoseconds."""
        sent_ns = self._sent_ns.get(address)
        if sent_ns is None:
            sent_ns = self._sent_ns[address] = deque()
        sent_ns.append(now_ns)
        self._plan.add(planning_ns)
        self._rows.add(len(plan.work.row_ids))
        self._tokens.add(plan.num_tokens)

    def answered(self, address: str, outcome: StepOutcome, now_ns: int) -> None:
        """Records the result of the oldest step in flight at `address`."""
        self._steps[outcome.status].inc()
        sent_ns = self._sent_ns.get(address)
        if sent_ns:
            self._round_trip.add(now_ns - sent_ns.popleft())
        if outcome.status is StepStatus.OK:
            self._move.add(outcome.move_us * _US)
            self._compute.add(outcome.compute_us * _US)

    def forget(self, address: str) -> None:
        """Forgets the steps in flight at an executor that is gone."""
        self._sent_ns.pop(address, None)


_NOT_LOST = frozenset({LossCause.BLAMELESS, LossCause.WITHDRAWN})


class RequestWatch:
    """Fills the metrics of request times and steps. Implements `Watcher`. `times`: of requests."""

    def __init__(self, instruments: Instruments) -> None:
        self.times = RequestTimes(instruments)
        self._steps = StepTimes(instruments)

    def families(self) -> list[Family]:
        """Returns the histograms that are not instruments of prometheus_client."""
        return [self.times.between_tokens.family(), *self._steps.families()]

    def see(self, turn: Transition) -> None:
        times, now_ns = self.times, turn.now_ns
        if (answered := turn.answered) is not None:
            self._steps.answered(answered.address, answered.outcome, now_ns)
        elif isinstance(turn.event, RequestSubmitted):
            times.submitted(turn.event.request, now_ns)
        for effect in turn.effects:
            if isinstance(effect, SendStep):
                sent_ns = turn.sent_ns
                if effect.plan.new_rows:
                    times.planned(effect.plan, sent_ns)
                self._steps.sent(effect.address, effect.plan, turn.planning_ns, sent_ns)
            elif isinstance(effect, DeliverTokens):
                times.delivered(effect.events, now_ns)
            elif isinstance(effect, RequestFinished):
                times.ended(effect.request, now_ns)
            elif isinstance(effect, ExecutorGone):
                self._steps.forget(effect.address)
                if effect.cause not in _NOT_LOST:
                    times.lost(effect.requests, now_ns)


_OTHER = "other"
_CHANGES = ("joined", "drained", "lost", "withdrawn")
# Ends of a request. The errors are those that mean a fault and are used in alerts.
_ENDS = (
    *(reason.value for reason in FinishReason if reason is not FinishReason.ERROR),
    "INVARIANT_BROKEN",
    "EXECUTOR_LOST_REPEATEDLY",
    "ROW_FAILED",
    "ADAPTER_INVALID",
)

_MAX_ADAPTER_LABELS = 100


class CountedAudit:
    """Counts audit events and passes them on to `audit`. Implements `Audit`.

    `has_numbers`: returns whether a tenant has series of its own.
    """

    def __init__(
        self, audit: Audit, instruments: Instruments, has_numbers: Callable[[str], bool]
    ) -> None:
        self._audit = audit
        self._has_numbers = has_numbers
        self._refused = instruments.counter("splitserve_requests_refused_total")
        self._ended = instruments.counter("splitserve_requests_total")
        self._prompt_tokens = instruments.counter("splitserve_prompt_tokens_total")
        self._tenant_requests = instruments.counter("splitserve_tenant_requests_total")
        self._tenant_prompts = instruments.counter("splitserve_tenant_prompt_tokens_total")
        self._tenant_outputs = instruments.counter("splitserve_tenant_output_tokens_total")
        self._adapter_requests = instruments.counter("splitserve_adapter_requests_total")
        self._adapters: set[str] = set()
        self._changes = instruments.counter("splitserve_executor_changes_total")
        self._quarantined = instruments.counter("splitserve_requests_quarantined_total")
        # Prometheus misses the first increment of a series that does not begin with 0.
        for counter, labels in (
            (self._changes, _CHANGES), (self._refused, CODE_OF_REASON), (self._ended, _ENDS)
        ):  # fmt: skip
            for label in labels:
                counter.labels(label)

    def record(self, event: AuditEvent) -> None:
        self._count(event)
        self._audit.record(event)

    def close(self) -> None:
        self._audit.close()

    def _count(self, event: AuditEvent) -> None:
        match event:
            case RequestAdmitted():
                self._prompt_tokens.inc(event.num_prompt_tokens)
                tenant = self._label(event.tenant)
                self._tenant_prompts.labels(tenant).inc(event.num_prompt_tokens)
                if event.adapter:
                    self._adapter_requests.labels(self._adapter_label(event.adapter)).inc()
            case RequestEnded():
                self._ended.labels(event.reason).inc()
                tenant = self._label(event.tenant)
                self._tenant_requests.labels(tenant).inc()
                self._tenant_outputs.labels(tenant).inc(event.num_output_tokens)
            case RequestRefused() | CallerRefused() | ExecutorRefused():
                self._refused.labels(event.reason).inc()
            case ExecutorRegistered():
                self._changes.labels("joined").inc()
            case ExecutorDrained():
                self._changes.labels("drained").inc()
            case ExecutorLost():
                self._changes.labels("lost").inc()
            case ExecutorWithdrawn():
                self._changes.labels("withdrawn").inc()
            case RequestQuarantined():
                self._quarantined.inc()
            case _:
                pass

    def _adapter_label(self, adapter: str) -> str:
        """Returns the metric label of an adapter: its name, or "other" if there are too many."""
        name = name_of(adapter)
        if len(self._adapters) < _MAX_ADAPTER_LABELS:
            self._adapters.add(name)
        return name if name in self._adapters else _OTHER

    def _label(self, tenant: str) -> str:
        """Returns the metric label of a tenant: the tenant itself, or "other" for unlisted tenants.

        Callers can invent any number of tenants, so only tenants with series of their own become
        labels.
        """
        return tenant if self._has_numbers(tenant) else _OTHER
