"""Effects of the scheduler: actions that the driver executes for it, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.values import Assignment, Request, StepEvents, StepPlan


class MoveReason(Enum):
    """Reason for which an unfinished request leaves an executor that stays."""

    BEGINS_SOONER_ELSEWHERE = "begins_sooner_elsewhere"
    DRAINED = "drained"
    FAILED_THERE = "failed_there"
    WITHDRAWN = "withdrawn"
    LAST_EXECUTOR = "last_executor"


class AcquittalReason(Enum):
    """Reason for which a quarantined request runs with other requests again."""

    CAME_THROUGH = "came_through"
    ANOTHER_FAILED = "another_failed"


class HealthChange(Enum):
    """Changes of an executor's circuit breaker and health.

    FAILING: the executor fails every request, and no other executor could replace it. RECOVERED: an
    executor that was failing brought a token. PROBE_FAILED: a probe failed. REINSTATED: the
    executor gets requests again after a probe succeeded.
    """

    FAILING = "executor_failing"
    RECOVERED = "executor_recovered"
    PROBE_FAILED = "executor_probe_failed"
    REINSTATED = "executor_reinstated"


@dataclass(frozen=True, slots=True)
class SendStep:
    """Sends `plan` to the executor."""

    address: str
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Has the executor load `adapter`, and evict all others but `kept`; `AdapterLoaded` answers."""

    address: str
    adapter: str
    kept: Sequence[str]


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """Delivers to clients the tokens of a step and the requests that ended."""

    events: StepEvents


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Reports the end of a request that no executor had; see its `finish_reason` and `error`."""

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
    """Reports that executors may have died of the request, which runs alone from now on."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestAcquitted:
    """Reports that a quarantined request runs with other requests again."""

    request: Request
    reason: AcquittalReason


@dataclass(frozen=True, slots=True)
class RequestBlamed:
    """Reports that a request failed because executors died of it; `RequestFinished` follows."""

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
    """Reports a call of the executor's engine that raised: our fault. `ExecutorGone` follows."""

    address: str
    call: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ExecutorGone:
    """Removes the executor: the driver ends its connection.

    `is_drained`: a drain left no request at the executor; `num_moved` requests moved during the
    drain. `requests`: requests that the executor had. `last_step_id`: the latest step of the
    executor; if the same life registers again, step ids continue from there.
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
    """Asks for a `Tick` at `at_ns`; replaces an earlier time. None: asks for no tick.

    A time that is not later than now means: after all events that arrived together.
    """

    at_ns: int | None


ExecutorEffect: TypeAlias = ExecutorServes | ExecutorHealthChanged | EngineFailed | ExecutorGone
Effect: TypeAlias = (
    SendStep
    | LoadAdapter
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
