"""Metrics of requests and steps."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric as Family

from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.metrics.request_times import RequestTimes
from scheduler_service.metrics.step_times import StepTimes
from scheduler_service.scheduler.effects import (
    DeliverTokens,
    ExecutorGone,
    RequestFinished,
    SendStep,
)
from scheduler_service.scheduler.events import RequestSubmitted
from scheduler_service.watching.turn import Turn
from splitserve_metrics.instruments import Instruments

_NOT_LOST = frozenset({LossCause.BLAMELESS, LossCause.WITHDRAWN})


class RequestWatch:
    """Fills instruments of times and counts. Implements `Watcher`. `times`: of requests."""

    def __init__(self, instruments: Instruments) -> None:
        self.times = RequestTimes(instruments)
        self._steps = StepTimes(instruments)

    def families(self) -> list[Family]:
        """Returns the histograms that are none of prometheus_client's own."""
        return [self.times.between_tokens.family(), *self._steps.families()]

    def see(self, turn: Turn) -> None:
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
