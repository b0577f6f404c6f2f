"""Effects of the scheduler: everything that the driver does for it, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.values.admission import Assignment
from scheduler_service.scheduler.values.plan import StepEvents, StepPlan
from scheduler_service.scheduler.values.request import Request


class MoveReason(Enum):
    """Reason for which an unfinished request leaves an executor that stays."""

    BEGINS_SOONER_ELSEWHERE = "begins_sooner_elsewhere"
    DRAINED = "drained"
    FAILED_THERE = "failed_there"
    WITHDRAWN = "withdrawn"
    LAST_EXECUTOR = "last_executor"


class AcquittalReason(Enum):
    """Why a quarantined request runs with others again."""

    CAME_THROUGH = "came_through"
    ANOTHER_FAILED = "another_failed"


class HealthChange(Enum):
    """Changes of an executor's circuit breaker, and of what is known of its health.

    FAILING: it fails whatever it is given, and no other executor could take its place.
    RECOVERED: one that was failing brought a token. PROBE_FAILED: a probe failed. REINSTATED: it
    gets requests again after a probe succeeded.
    """

    FAILING = "executor_failing"
    RECOVERED = "executor_recovered"
    PROBE_FAILED = "executor_probe_failed"
    REINSTATED = "executor_reinstated"


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send `plan` to the executor."""

    address: str
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """Tell clients what a step brought, and which requests have ended."""

    events: StepEvents


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended that no executor had; its `finish_reason` and `error` say how."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestAssigned:
    """Assigns a request to the executor at `address`, which begins it when it has room."""

    request: Request
    address: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class RequestMoved:
    """Returns a request from the executor at `address` to the waiting queue or quarantine."""

    request: Request
    address: str
    reason: MoveReason


@dataclass(frozen=True, slots=True)
class RequestQuarantined:
    """Executors may have died of the request: it is tried alone from now on."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestAcquitted:
    """A quarantined request runs with others again."""

    request: Request
    reason: AcquittalReason


@dataclass(frozen=True, slots=True)
class RequestBlamed:
    """A request failed because executors died of it; `RequestFinished` follows."""

    request: Request


@dataclass(frozen=True, slots=True)
class ExecutorServes:
    """Announces that the executor serves requests."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorHealthChanged:
    """Reports a change of the executor's health or circuit breaker."""

    address: str
    change: HealthChange


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """A call of the executor's engine raised: a fault of ours. `ExecutorGone` follows."""

    address: str
    call: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ExecutorGone:
    """The executor is removed: end its connection.

    `is_drained`: nothing was left of a drain, in which `num_moved` requests moved. `requests`:
    what it had. `last_step_id`: of its latest step, from which a return of the same life goes on.
    """

    address: str
    epoch: int
    cause: LossCause
    why: str
    requests: Sequence[Request]
    last_step_id: int
    is_drained: bool = False
    num_moved: int = 0


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `Tick` at `at_ns`, instead of any time asked for before. None: not at all.

    A time that is not later than now means: after everything that arrived together.
    """

    at_ns: int | None


ExecutorEffect: TypeAlias = ExecutorServes | ExecutorHealthChanged | EngineFailed | ExecutorGone
Effect: TypeAlias = (
    SendStep
    | DeliverTokens
    | RequestFinished
    | RequestAssigned
    | RequestMoved
    | RequestQuarantined
    | RequestAcquitted
    | RequestBlamed
    | WakeAt
    | ExecutorEffect
)
