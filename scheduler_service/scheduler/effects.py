"""Effects of the scheduler: everything that the driver does for it, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from scheduler_service.assignment import Assignment
from scheduler_service.core.plan import StepEvents, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.fleet.executor_losses import LossCause


class MoveReason(Enum):
    """Why a request left an executor that is still there, before it ended."""

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
    """A request was given to the executor, which begins it as soon as it can."""

    request: Request
    address: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class RequestMoved:
    """A request left the executor and waits for one again."""

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
    """The executor gets requests from now on."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorHealthChanged:
    """What is known of the executor's health has changed."""

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
