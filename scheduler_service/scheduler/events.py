"""Events of the scheduler: everything that it learns from outside, besides the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import StepOutcome
from scheduler_service.scheduler.values.request import Request


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """A client submitted `request`, which `Scheduler.check` accepted."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """A client, or its disconnection, ended a request. An unknown id is ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """An executor registered and answered. It gets requests after `ExecutorConnected`.

    `epoch` identifies the life of its process. `last_step_id`: the latest step that this life was
    ever sent. `num_credits`: steps that may be in flight at once. `scheduler_epoch`: fencing token
    of the batches that it is sent.
    """

    address: str
    epoch: int
    config: SchedulerConfig
    num_credits: int
    last_step_id: int = 0
    scheduler_epoch: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorConnected:
    """The executor at `address` serves from now on."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorDoubted:
    """Whether the executor is late, silent or cut off, and so should get no new requests."""

    address: str
    is_doubtful: bool


@dataclass(frozen=True, slots=True)
class ExecutorDraining:
    """An operator, or the executor, began a drain: running requests finish, no new ones begin."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorDrainExpired:
    """The time for draining is over: requests that still run there move."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorUndrained:
    """The executor that was draining stays."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The executor is lost: its requests are recomputed elsewhere. `why` is for people."""

    address: str
    cause: LossCause
    why: str


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """The executor answered its oldest step in flight.

    `was_sent`: False for a batch that was too large to be sent, which says nothing of the executor.
    """

    address: str
    outcome: StepOutcome
    was_sent: bool = True


@dataclass(frozen=True, slots=True)
class TenantsWeighed:
    """An operator changed the weights of tenants; an unnamed tenant has weight 1."""

    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, as a `WakeAt` asked for.

    `looks_everywhere`: the driver found no progress, and asks to check all executors for work.
    """

    looks_everywhere: bool = False


ExecutorEvent: TypeAlias = (
    ExecutorJoined
    | ExecutorConnected
    | ExecutorDoubted
    | ExecutorDraining
    | ExecutorDrainExpired
    | ExecutorUndrained
    | ExecutorLost
)
Event: TypeAlias = (
    RequestSubmitted | RequestAborted | StepCompleted | TenantsWeighed | Tick | ExecutorEvent
)
