"""Events of the scheduler: its only inputs from outside, besides the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.values import Request, SchedulerConfig, StepOutcome, StepPart


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """A client submitted `request`, which `Scheduler.check` accepted."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """Ends a request whose client aborted it or disconnected. An unknown id is ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """Reports that an executor registered and answered.

    It gets requests after `ExecutorConnected`.

    `epoch` identifies the life of its process. `last_step_id`: the latest step that this life was
    ever sent. `num_credits`: steps that may be in flight at once. `scheduler_epoch`: fencing token
    of the batches sent to the executor.
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
    """Reports whether the executor is late, silent or cut off, and so gets no new requests."""

    address: str
    is_doubtful: bool


@dataclass(frozen=True, slots=True)
class ExecutorDraining:
    """Begins a drain for an operator or the executor: running requests finish, none begins."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorDrainExpired:
    """Ends the time for draining: requests that still run at the executor move."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorUndrained:
    """Cancels the drain of an executor."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """Reports a lost executor: its requests are recomputed elsewhere. `why`: text for operators."""

    address: str
    cause: LossCause
    why: str


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """Brings the executor's answer to its oldest step in flight.

    `was_sent`: False for a batch that was too large to be sent; such an outcome does not count
    against the executor.
    """

    address: str
    outcome: StepOutcome
    was_sent: bool = True


@dataclass(frozen=True, slots=True)
class StepProgressed:
    """Brings tokens of the executor's oldest step in flight before the step is done."""

    address: str
    part: StepPart


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The executor at `address` has loaded `adapter`, or cannot: `why_not`, for people."""

    address: str
    adapter: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRegistered:
    """An operator registers `adapter`: an executor with a slot for it loads it ahead of need."""

    adapter: str


@dataclass(frozen=True, slots=True)
class TenantsWeighed:
    """Sets the tenant weights, changed by an operator; an unnamed tenant has weight 1."""

    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Reports the time that a `WakeAt` asked for.

    `looks_everywhere`: the driver found no progress and asks the scheduler to check all executors
    for work.
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
    | AdapterLoaded
)
Event: TypeAlias = (
    RequestSubmitted
    | RequestAborted
    | StepCompleted
    | StepProgressed
    | AdapterRegistered
    | TenantsWeighed
    | Tick
    | ExecutorEvent
)
