"""Implements `Observer` with the instruments of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric as Family

from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.metrics.request_times import RequestTimes
from scheduler_service.metrics.step_times import StepTimes
from scheduler_service.observer import NoObserver
from scheduler_service.request_names import RequestName
from splitserve_metrics.instruments import Instruments


class RequestWatch(NoObserver):
    """Used in the event loop. `times`: of requests."""

    def __init__(self, instruments: Instruments, now_ns: Callable[[], int]) -> None:
        self.times = RequestTimes(instruments, now_ns)
        self._steps = StepTimes(instruments, now_ns)

    def families(self) -> list[Family]:
        """What prometheus_client's own instruments do not have."""
        return [self.times.between_tokens.family(), *self._steps.families()]

    def request_submitted(self, request: Request, name: RequestName, num_waiting: int) -> None:
        self.times.submitted(request)

    def request_ended(self, request: Request) -> None:
        self.times.ended(request)

    def tokens_delivered(self, events: StepEvents) -> None:
        self.times.delivered(events)

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        self.times.planned(plan)
        self._steps.sent(address, plan, planning_ns)

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        self._steps.answered(address, outcome)

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        self._steps.forget(address)
        if is_lost:
            self.times.lost(requests)
