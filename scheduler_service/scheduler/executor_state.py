"""State of one executor in the scheduler, and recovery of the requests of a closed engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.engine.outcomes import is_lost_too_often
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    FinishReason,
    Request,
    SchedulerConfig,
    StepEvents,
)

Life: TypeAlias = tuple[str, int]


@dataclass(slots=True, eq=False)
class ExecutorState:
    """State of one executor: its engine, and flags that decide whether it gets requests.

    `epoch` identifies the life of its process at `address`. `num_credits`: steps that may be in
    flight at once. `is_withdrawn`: its circuit breaker is open, so it gets probes only.
    `is_failing`: it fails every request. `is_doubtful`: it is late, silent or cut off. `is_broken`:
    a call of its engine raised, and the executor is about to be removed. `has_lost_events`: that
    call was `apply`, whose events were not delivered. `has_answered`: some step of this engine was
    answered. `num_moved`: requests that left because the executor drains. `blockers`: requests that
    did not begin with its latest step, each with its blocker.
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
    blockers: Mapping[Request, AdmissionBlocker] = field(default_factory=dict)

    @property
    def life(self) -> Life:
        """Life of the executor's process: address and epoch."""
        return self.address, self.epoch

    @property
    def is_serving(self) -> bool:
        """Whether the executor is connected, not draining or withdrawn, and its engine is sound."""
        is_leaving = self.is_draining or self.is_withdrawn or self.is_broken
        return self.is_connected and not is_leaving

    @property
    def takes_requests(self) -> bool:
        """Whether the executor is serving and answers in time."""
        return self.is_serving and not self.is_doubtful


# -- Recovery of requests from a closed engine -----------------------------------------------------
#
# A fault of the scheduler ends as few requests as possible.

FAULT_REASON = "INVARIANT_BROKEN"
FAULT_MESSAGE = "internal error of the scheduler; see its log for details"


@dataclass(slots=True)
class RecoveredRequests:
    """Requests recovered from an engine that is closed.

    Unfinished requests among them are ready for another engine. `faults`: names of the engine calls
    that raised meanwhile, each with its exception.
    """

    requests: list[Request] = field(default_factory=list)
    faults: list[tuple[str, Exception]] = field(default_factory=list)


def rescue(executor: ExecutorState) -> RecoveredRequests:
    """Evacuates the engine of an executor, sound or broken.

    Returns all unfinished requests, and the requests that ended and whose owners were not told.
    If the engine broke, ends with an error each request that saw too many engines break without a
    new token in between, since nobody knows which request breaks them. If the events of a step were
    lost, ends also each request whose known tokens cannot be told apart from the lost ones.
    """
    rescued = RecoveredRequests()
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
    """Ends a request that no engine has, with the error INVARIANT_BROKEN."""
    request.completions = []
    request.finish_reason, request.error = FinishReason.ERROR, (FAULT_REASON, FAULT_MESSAGE)


def _evacuate(executor: ExecutorState, rescued: RecoveredRequests) -> list[Request]:
    try:
        return executor.engine.evacuate()
    except Exception as error:  # a broken engine may fail here, too
        rescued.faults.append(("evacuate", error))
        return []


def _take_ended(executor: ExecutorState, rescued: RecoveredRequests) -> StepEvents:
    try:
        return executor.engine.take_ended()
    except Exception as error:
        rescued.faults.append(("take_ended", error))
        return StepEvents()


def _is_hidden(request: Request) -> bool:
    """Returns whether the request has beams or unstreamed tokens, which its tokens do not show."""
    has_begun = any(sequence.num_output_tokens for sequence in request.sequences)
    return not request.params.is_streamed and (has_begun or request.search is not None)


def saw_too_many_break(request: Request) -> bool:
    """Counts a broken engine against a request; returns whether the request saw too many break.

    The engine had the request, or looked at it last. A new token of the request restarts the count.
    """
    num_tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
    return is_lost_too_often(request, num_tokens)
