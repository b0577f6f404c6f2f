"""What becomes of the requests of a core that failed: a fault of ours costs as little as it can."""

from __future__ import annotations

import logging

from scheduler_service.core.outcomes.losses import is_lost_too_often
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.journal.core import Core

REASON = "INVARIANT_BROKEN"
MESSAGE = "a fault of the scheduler; its log has the details"

_log = logging.getLogger(__name__)


class CoreBroken(ExecutorLost):
    """A call of the core raised: it is given up, and its executor with it."""

    # `rescue` counts these, and for those that saw it happen it is not about their executors.
    cause = LossCause.BLAMELESS

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__(f"its core failed in {call}: {type(error).__name__}")


def rescue(core: Core, broken: CoreBroken | None, *, has_lost_events: bool) -> list[Request]:
    """All unfinished requests, and those whose end nobody was told, of a core that is given up.

    Whose fault it was, nobody knows. Finished with an error are those that saw too many cores fail
    without a new token in between; with `has_lost_events` (`apply` raised) also those whose tokens
    cannot be told apart from what got lost. All others are ready for another core.
    """
    ended = _take_ended(core)
    requests = _evacuate(core)
    half_told = {sequence.request.request_id for sequence in ended.finished_sequences}
    for request in requests:
        if request.is_finished:
            continue
        is_unclear = has_lost_events and (request.request_id in half_told or _is_hidden(request))
        if is_unclear or (broken is not None and _is_hopeless(request)):
            end_with_fault(request)
    for request in ended.finished:
        if has_lost_events and request.error is None:
            end_with_fault(request)
    return [*requests, *ended.finished]


def end_with_fault(request: Request) -> None:
    """Ends a request that no core has, with INVARIANT_BROKEN."""
    request.completions = []
    request.finish_reason, request.error = FinishReason.ERROR, (REASON, MESSAGE)


def _evacuate(core: Core) -> list[Request]:
    try:
        return core.evacuate()
    except Exception:  # whatever broke it may break this, too
        _log.exception("core_evacuation_failed")
        return []


def _take_ended(core: Core) -> StepEvents:
    try:
        return core.take_ended()
    except Exception:
        _log.exception("core_evacuation_failed")
        return StepEvents()


def _is_hidden(request: Request) -> bool:
    """Whether it has a state that its tokens do not show."""
    has_begun = any(sequence.num_output_tokens for sequence in request.sequences)
    return not request.params.is_streamed and (has_begun or request.search is not None)


def _is_hopeless(request: Request) -> bool:
    num_tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
    return is_lost_too_often(request, num_tokens)
