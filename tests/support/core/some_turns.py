"""Turns for watchers, without a driver."""

from __future__ import annotations

from scheduler_service.callers.caller import Admission
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.effects import Effect
from scheduler_service.scheduler.events import Event, RequestSubmitted, Tick
from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.scheduler.values.config import FleetConfig
from scheduler_service.scheduler.values.request import Request
from scheduler_service.watching.transition import Submission, Transition

_SCHEDULER = Scheduler(FleetConfig())


def turn(*effects: Effect, event: Event | None = None, now_ns: int = 0) -> Transition:
    """A turn of a scheduler that has no executors."""
    return Transition.of(event or Tick(), effects, now_ns, _SCHEDULER)


def submitted(request: Request, name: RequestName | None = None, now_ns: int = 0) -> Transition:
    """The turn in which `request` comes. `name`: None for that of its id."""
    admission = Admission(name or RequestName(request.request_id))
    submission = Submission(admission, now_ns)
    return Transition.of(RequestSubmitted(request), (), now_ns, _SCHEDULER, 0, submission)
