"""Requests of an engine that failed: a fault of the scheduler costs as little as possible."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.outcomes.losses import is_lost_too_often
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.scheduler.executor_state import ExecutorState

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
