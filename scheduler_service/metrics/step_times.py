"""How long steps take, and how large they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from scheduler_service.core.plan import StepOutcome, StepPlan, StepStatus
from splitserve_metrics.instruments import Instruments


class StepTimes:
    """Told as `Observer` is."""

    def __init__(self, instruments: Instruments, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        steps = instruments.counter("splitserve_steps_total")
        self._steps = {status: steps.labels(status.value) for status in StepStatus}
        durations = instruments.histogram("splitserve_step_duration_seconds")
        # A child is looked up once: that costs as much as to count with it.
        self._plan, self._round_trip, self._move, self._compute = (
            durations.labels(phase) for phase in ("plan", "round_trip", "move", "compute")
        )
        self._rows = instruments.histogram("splitserve_step_rows")
        self._tokens = instruments.histogram("splitserve_step_tokens")
        # When steps without an answer were sent, by executor, in their order.
        self._sent_ns: dict[str, deque[int]] = {}

    def sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        """To the executor at `address`."""
        self._sent_ns.setdefault(address, deque()).append(self._now_ns())
        self._plan.observe(planning_ns / 1e9)
        self._rows.observe(len(plan.work.row_ids))
        self._tokens.observe(plan.num_tokens)

    def answered(self, address: str, outcome: StepOutcome) -> None:
        """The oldest step there."""
        self._steps[outcome.status].inc()
        sent_ns = self._sent_ns.get(address)
        if sent_ns:
            self._round_trip.observe((self._now_ns() - sent_ns.popleft()) / 1e9)
        if outcome.status is StepStatus.OK:
            self._move.observe(outcome.move_us / 1e6)
            self._compute.observe(outcome.compute_us / 1e6)

    def forget(self, address: str) -> None:
        """Nothing there will be answered."""
        self._sent_ns.pop(address, None)
