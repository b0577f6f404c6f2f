"""Lives of requests from a journal: its cores decide again, and a recorder is told of it."""

from __future__ import annotations

from pathlib import Path

from scheduler_service.assignment import AssignedFor, Assignment
from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.replay import Call, replay
from scheduler_service.request_lives.life_recorder import LifeRecorder
from scheduler_service.request_names import RequestName
from scheduler_service.scheduler.effects import AcquittalReason, MoveReason


def lives_of(path: Path, num_kept: int) -> LifeRecorder:
    """What the segment in `path` says of requests. Raises JournalUnreadable.

    It says what executors were told: of refusals, and of who waits for the first, it knows nothing;
    of those that had one, when they came and not why they waited.
    """
    watched = _Watched(num_kept)
    replay(path, watched)
    return watched.recorder


class _Watched:
    """Tells a recorder what it would have been told by whoever asked these cores."""

    def __init__(self, num_kept: int) -> None:
        self._now_ns = 0
        self._known: set[str] = set()
        self._isolated: set[str] = set()
        self.recorder = LifeRecorder(num_kept, lambda: self._now_ns)

    def called(self, address: str, core: Scheduler, call: Call, result: object) -> None:
        self._now_ns = max(self._now_ns, core.placement.now_ns)
        if call.request is not None:
            self._given(call.request, address)
        match call.name, result:
            case "withdraw", Request():
                why = MoveReason.BEGINS_SOONER_ELSEWHERE
                self.recorder.request_taken_back(result, address, why)
            case "evacuate", list():
                self.recorder.executor_gone(address, result, is_lost=True)
            case "schedule", StepPlan():
                self.recorder.step_sent(address, result, 0)
            case "apply", (StepOutcome() as outcome, StepEvents() as events):
                self.recorder.step_answered(address, outcome)
                for request in events.acquitted:
                    self._acquitted(request, AcquittalReason.CAME_THROUGH)
                self._ended(events)
            case "take_ended", StepEvents():
                self._ended(result)

    def _given(self, request: Request, address: str) -> None:
        assignment = None
        if request.request_id not in self._known:
            self._known.add(request.request_id)
            self._came(request)
        if request.num_trials_left:
            assignment = Assignment(AssignedFor.TRIED_ALONE)
            if request.request_id not in self._isolated:
                self._isolated.add(request.request_id)
                self.recorder.request_quarantined(request)
        elif request.request_id in self._isolated:
            # It waited for its trial when that was no longer needed; when exactly is not known.
            self._acquitted(request, AcquittalReason.ANOTHER_FAILED)
        self.recorder.request_given(request, address, assignment)

    def _came(self, request: Request) -> None:
        """It is told of by when it came, if the journal says that."""
        now_ns = self._now_ns
        if request.submitted_ns is not None:
            self._now_ns = min(request.submitted_ns, now_ns)
        name = RequestName.of_key(request.request_id, request.scheduling.tenant)
        self.recorder.request_found(request, name)
        self._now_ns = now_ns

    def _acquitted(self, request: Request, why: AcquittalReason) -> None:
        self._isolated.discard(request.request_id)
        self.recorder.request_acquitted(request, why)

    def _ended(self, events: StepEvents) -> None:
        for request in events.finished:
            self._known.discard(request.request_id)
            self._isolated.discard(request.request_id)
            self.recorder.request_ended(request)
