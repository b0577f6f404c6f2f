"""Turns of the scheduler: each event with the effects that followed, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler_service.callers.caller import Admission
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.effects import Effect, ExecutorGone
from scheduler_service.scheduler.events import Event, StepCompleted
from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Submission:
    """What a request was taken as, and when.

    `num_waiting`: requests that waited for an executor before it.
    """

    admission: Admission
    submitted_ns: int
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request that was not taken, so that the scheduler never learns of it.

    `name`: with an empty id if the client gave none. `caller`: who submitted it. `limit`: of the
    tenant, if that is the reason; empty otherwise. `detail`: what the client was told.
    """

    name: RequestName
    caller: str
    tenant: str
    reason: str
    limit: str
    detail: str


class Turn(NamedTuple):
    """One call of `Scheduler.handle`, told after the driver has executed the effects.

    `now_ns`: the time that the scheduler was given. `scheduler`: its state after the turn, to be
    read within `Watcher.see`. `answered`: the event, if it is the answer to a step, and the
    scheduler accepted it. `planning_ns`: mean time to decide and encode each step that was sent.
    `submission`: of a `RequestSubmitted`. `model_name`: of the model that clients are served, in
    turns of a `RequestSubmitted` or an `ExecutorConnected`.
    """

    event: Event | RequestRefused
    effects: Sequence[Effect]
    now_ns: int
    scheduler: Scheduler
    answered: StepCompleted | None = None
    planning_ns: int = 0
    submission: Submission | None = None
    model_name: str = ""

    @classmethod
    def of(
        cls,
        event: Event,
        effects: Sequence[Effect],
        now_ns: int,
        scheduler: Scheduler,
        planning_ns: int = 0,
        submission: Submission | None = None,
    ) -> Turn:
        """Makes a turn with what follows from the event and the effects."""
        answered = event if isinstance(event, StepCompleted) else None
        if answered is not None and answered.address not in scheduler.executors:
            answered = answered if any(map(_is_sound_removal, effects)) else None
        return cls(event, effects, now_ns, scheduler, answered, planning_ns, submission)

    @property
    def sent_ns(self) -> int:
        """Time at which steps of this turn were sent."""
        return self.now_ns + self.planning_ns


def _is_sound_removal(effect: Effect) -> bool:
    """Whether an executor is removed for another reason than its latest answer."""
    if not isinstance(effect, ExecutorGone):
        return False
    return effect.is_drained or effect.cause is LossCause.WITHDRAWN


class Watcher(Protocol):
    """A fold over turns: it learns everything from them, and decides nothing."""

    def see(self, turn: Turn) -> None:
        """Takes note of a turn. Raises nothing, and returns soon: the event loop waits."""
        ...
