"""Turns of the scheduler: each event with its effects, in order, and the protocol of watchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler_service.callers import Admission
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import (
    Effect,
    Event,
    ExecutorGone,
    LossCause,
    Scheduler,
    StepCompleted,
    StepProgressed,
)
from scheduler_service.scheduler.values import Request

# Finish reason of a request whose client left, or whose scheduler stopped, before the end.
ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Submission:
    """Admission record of a request, with its submission time.

    `num_waiting`: number of requests that waited for an executor before it.
    """

    admission: Admission
    submitted_ns: int
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Request that was refused before it reached the scheduler.

    `name`: has an empty id if the client gave none. `caller`: name of the submitting caller.
    `limit`: the tenant's limit, if that was the reason; empty otherwise. `detail`: text that the
    client got.
    """

    name: RequestName
    caller: str
    tenant: str
    reason: str
    limit: str
    detail: str


class Transition(NamedTuple):
    """Record of a `Scheduler.handle` call, shown to watchers after its effects were executed.

    `now_ns`: time that the scheduler was given. `scheduler`: state after the turn, to be read
    within `Watcher.see` only. `answered`: the event, if it is an answer to a step that the
    scheduler accepted. `planning_ns`: mean time to decide and encode each step of the turn.
    `submission`: of a `RequestSubmitted`. `model_name`: the served model, in turns of a
    `RequestSubmitted` or an `ExecutorConnected`. `progressed`: the event, if it is a part of a
    result that the scheduler accepted.
    """

    event: Event | RequestRefused
    effects: Sequence[Effect]
    now_ns: int
    scheduler: Scheduler
    answered: StepCompleted | None = None
    planning_ns: int = 0
    submission: Submission | None = None
    model_name: str = ""
    progressed: StepProgressed | None = None

    @classmethod
    def of(
        cls,
        event: Event,
        effects: Sequence[Effect],
        now_ns: int,
        scheduler: Scheduler,
        planning_ns: int = 0,
        submission: Submission | None = None,
    ) -> Transition:
        """Makes a turn; derives `answered` and `progressed` from the event and the effects."""
        answered = event if isinstance(event, StepCompleted) else None
        if answered is not None and answered.address not in scheduler.executors:
            answered = answered if any(map(_is_sound_removal, effects)) else None
        turn = cls(event, effects, now_ns, scheduler, answered, planning_ns, submission)
        if isinstance(event, StepProgressed) and event.address in scheduler.executors:
            turn = turn._replace(progressed=event)
        return turn

    @property
    def sent_ns(self) -> int:
        """Time at which the steps of this turn were sent, in nanoseconds."""
        return self.now_ns + self.planning_ns


def _is_sound_removal(effect: Effect) -> bool:
    """Returns whether an effect removes an executor for another reason than its latest answer."""
    if not isinstance(effect, ExecutorGone):
        return False
    return effect.is_drained or effect.cause is LossCause.WITHDRAWN


class Watcher(Protocol):
    """Fold over the turns of the scheduler. Learns everything from turns and decides nothing."""

    def see(self, turn: Transition) -> None:
        """Processes a turn. Raises nothing, and returns soon because the event loop waits."""
        ...


def finish_reason_of(request: Request) -> str:
    """Returns the finish reason of a request that ended; ABANDONED if it has none."""
    return ABANDONED if request.finish_reason is None else request.finish_reason.value


def end_of(request: Request) -> str:
    """Returns the reason of the error of a request that ended, else its finish reason."""
    return finish_reason_of(request) if request.error is None else request.error[0]
