"""Lives of requests from a journal: a scheduler decides again, and a recorder is told of it."""

from __future__ import annotations

from pathlib import Path

from scheduler_service.assignment import AssignedFor, Assignment
from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.journal.replay import replay
from scheduler_service.observer import Head
from scheduler_service.request_lives.life_recorder import LifeRecorder
from scheduler_service.request_names import RequestName
from scheduler_service.scheduler import effects, events
from scheduler_service.scheduler.scheduler import Place, Scheduler

# As often as the driver tells of the first that wait.
_BETWEEN_HEADS_NS = 100_000_000


def lives_of(path: Path, num_kept: int) -> LifeRecorder:
    """Returns what the segment in `path` says of requests. Raises JournalUnreadable.

    Of requests that were refused it says nothing. Of those that were there when the segment began,
    it says when they came, and not why they waited before.
    """
    watched = _Watched(num_kept)
    replay(path, watched)
    return watched.recorder


class _Watched:
    """Tells a recorder what the driver would have told it."""

    def __init__(self, num_kept: int) -> None:
        self._now_ns = 0
        self._next_heads_ns = 0
        self._scheduler: Scheduler | None = None
        self.recorder = LifeRecorder(num_kept, lambda: self._now_ns)

    # -- Witness -------------------------------------------------------------------------------

    def begins(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        for place in scheduler.places.values():
            self._find(place, scheduler.now_ns)

    def handles(self, scheduler: Scheduler, event: events.Event, now_ns: int) -> None:
        self._now_ns = now_ns
        if isinstance(event, events.RequestSubmitted):
            request = event.request
            name = RequestName.of_key(request.request_id, request.scheduling.tenant)
            self.recorder.request_submitted(request, name, scheduler.num_waiting)

    def handled(self, event: events.Event, found: list[effects.Effect], now_ns: int) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        if isinstance(event, events.StepCompleted) and event.address in scheduler.executors:
            self.recorder.step_answered(event.address, event.outcome)
        for effect in found:
            self._tell(effect)
        if scheduler.num_queued and now_ns >= self._next_heads_ns:
            self._next_heads_ns = now_ns + _BETWEEN_HEADS_NS
            heads = scheduler.heads()
            self.recorder.heads_wait([Head(request, tuple(why)) for request, why in heads])

    # -- parts ---------------------------------------------------------------------------------

    def _find(self, place: Place, now_ns: int) -> None:
        """Tells of a request that was there when the segment began."""
        request = place.request
        name = RequestName.of_key(request.request_id, request.scheduling.tenant)
        self._now_ns = now_ns if request.submitted_ns is None else request.submitted_ns
        self.recorder.request_found(request, name)
        self._now_ns = now_ns
        if request.num_trials_left:
            self.recorder.request_quarantined(request)
        if place.executor is not None:
            assignment = Assignment(AssignedFor.TRIED_ALONE) if request.num_trials_left else None
            self.recorder.request_given(request, place.executor.address, assignment)

    def _tell(self, effect: effects.Effect) -> None:
        """Tells of an effect, as the driver does when it executes one."""
        recorder = self.recorder
        match effect:
            case effects.SendStep(address, plan):
                recorder.step_sent(address, plan, 0)
            case effects.DeliverTokens(found):
                recorder.tokens_delivered(found)
                for request in found.finished:
                    recorder.request_ended(request)
            case effects.RequestAssigned(request, address, assignment):
                recorder.request_given(request, address, assignment)
            case effects.RequestFinished(request):
                recorder.request_ended(request)
            case effects.RequestMoved(request, address, reason):
                recorder.request_taken_back(request, address, reason)
            case effects.RequestQuarantined(request):
                recorder.request_quarantined(request)
            case effects.RequestAcquitted(request, why):
                recorder.request_acquitted(request, why)
            case effects.ExecutorGone():
                self._gone(effect)

    def _gone(self, gone: effects.ExecutorGone) -> None:
        # The requests of a withdrawn executor were moved before.
        requests = () if gone.cause is LossCause.WITHDRAWN else gone.requests
        is_lost = not gone.cause.says_nothing
        self.recorder.executor_gone(gone.address, requests, is_lost=is_lost)
