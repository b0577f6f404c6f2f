"""What the scheduler knows of one executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.engine.outcomes.losses import is_lost_too_often
from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import StepEvents
from scheduler_service.scheduler.values.request import FinishReason, Request

Life: TypeAlias = tuple[str, int]


@dataclass(slots=True, eq=False)
class ExecutorState:
    """State of one executor: its engine, and flags that decide whether it gets requests.

    `epoch` identifies the life of its process at `address`. `num_credits`: steps that may be in
    flight at once. `is_withdrawn`: its circuit breaker is open, so it gets probes only.
    `is_failing`: whatever it computes fails. `is_doubtful`: it is late, silent or cut off.
    `is_broken`: a call of its engine raised, and it is about to be removed. `has_lost_events`: that
    call was `apply`, whose events reached nobody. `has_answered`: any step of this engine was
    answered. `num_moved`: requests that left because it drains. `lacks`: what requests lacked that
    did not begin with its latest step.
    """

    address: str
    epoch: int
    config: SchedulerConfig
    engine: Engine
    num_credits: int
    is_connected: bool = False
    is_draining: bool = False
    is_withdrawn: bool = False
    is_failing: bool = False
    is_doubtful: bool = False
    is_broken: bool = False
    has_lost_events: bool = False
    has_answered: bool = False
    num_moved: int = 0
    lacks: Mapping[Request, AdmissionBlocker] = field(default_factory=dict)

    @property
    def life(self) -> Life:
        """Address and epoch."""
        return self.address, self.epoch

    @property
    def is_serving(self) -> bool:
        """Whether the executor is connected and to stay, and its results and engine are sound."""
        is_leaving = self.is_draining or self.is_withdrawn or self.is_broken
        return self.is_connected and not is_leaving

    @property
    def takes_requests(self) -> bool:
        """Whether the executor serves and answers in time."""
        return self.is_serving and not self.is_doubtful


# -- Requests of an engine that failed: a fault of the scheduler costs as little as possible -------

REASON = "INVARIANT_BROKEN"
MESSAGE = "a fault of the scheduler; its log has the details"


@dataclass(slots=True)
class Rescued:
    """Requests recovered from an engine that is closed.

    Those that are not finished are ready for another engine. `faults`: calls of the engine that
    raised meanwhile, with what they raised.
    """

    requests: list[Request] = field(default_factory=list)
    faults: list[tuple[str, Exception]] = field(default_factory=list)


def rescue(executor: ExecutorState) -> Rescued:
    """Evacuates the engine of an executor, sound or broken.

    Returns all unfinished requests, and those that ended and whose owners were not told. Where the
    engine broke, whose fault that was is unknown. Ends with an error those that saw too many
    engines break without a new token in between, and, if the events of a step were lost, also those
    whose tokens cannot be told apart from the lost ones.
    """
    rescued = Rescued()
    ended = _take_ended(executor, rescued)
    requests = _evacuate(executor, rescued)
    half_told = {sequence.request.request_id for sequence in ended.finished_sequences}
    has_lost_events = executor.has_lost_events
    for request in requests:
        if request.is_finished:
            continue
        is_unclear = has_lost_events and (request.request_id in half_told or _is_hidden(request))
        if is_unclear or (executor.is_broken and saw_too_many_break(request)):
            end_with_fault(request)
    for request in ended.finished:
        if has_lost_events and request.error is None:
            end_with_fault(request)
    rescued.requests = [*requests, *ended.finished]
    return rescued


def end_with_fault(request: Request) -> None:
    """Ends a request that no engine has, with INVARIANT_BROKEN."""
    request.completions = []
    request.finish_reason, request.error = FinishReason.ERROR, (REASON, MESSAGE)


def _evacuate(executor: ExecutorState, rescued: Rescued) -> list[Request]:
    try:
        return executor.engine.evacuate()
    except Exception as error:  # whatever broke it may break this, too
        rescued.faults.append(("evacuate", error))
        return []


def _take_ended(executor: ExecutorState, rescued: Rescued) -> StepEvents:
    try:
        return executor.engine.take_ended()
    except Exception as error:
        rescued.faults.append(("take_ended", error))
        return StepEvents()


def _is_hidden(request: Request) -> bool:
    """Whether the request has a state that its tokens do not show."""
    has_begun = any(sequence.num_output_tokens for sequence in request.sequences)
    return not request.params.is_streamed and (has_begun or request.search is not None)


def saw_too_many_break(request: Request) -> bool:
    """Counts an engine that broke while it had the request, or looked at it."""
    num_tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
    return is_lost_too_often(request, num_tokens)
