"""How long steps take, and how large they are."""

from __future__ import annotations

from collections import deque

from prometheus_client.metrics_core import HistogramMetricFamily

from scheduler_service.core.plan import StepOutcome, StepPlan, StepStatus
from splitserve_metrics.bulk_histogram import BulkHistogram
from splitserve_metrics.instruments import Instruments

_US, _NS = 1000, 1e-9


class StepTimes:
    """Durations and sizes of steps."""

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
        # When steps without an answer were sent, by executor, in their order.
        self._sent_ns: dict[str, deque[int]] = {}

    def families(self) -> list[HistogramMetricFamily]:
        """What is known now."""
        return [histogram.family() for histogram in self._histograms]

    def sent(self, address: str, plan: StepPlan, planning_ns: int, now_ns: int) -> None:
        """Takes note of a step that was sent to the executor at `address`."""
        sent_ns = self._sent_ns.get(address)
        if sent_ns is None:
            sent_ns = self._sent_ns[address] = deque()
        sent_ns.append(now_ns)
        self._plan.add(planning_ns)
        self._rows.add(len(plan.work.row_ids))
        self._tokens.add(plan.num_tokens)

    def answered(self, address: str, outcome: StepOutcome, now_ns: int) -> None:
        """Takes note of the result of the oldest step there."""
        self._steps[outcome.status].inc()
        sent_ns = self._sent_ns.get(address)
        if sent_ns:
            self._round_trip.add(now_ns - sent_ns.popleft())
        if outcome.status is StepStatus.OK:
            self._move.add(outcome.move_us * _US)
            self._compute.add(outcome.compute_us * _US)

    def forget(self, address: str) -> None:
        """Forgets the steps of an executor that is gone."""
        self._sent_ns.pop(address, None)
