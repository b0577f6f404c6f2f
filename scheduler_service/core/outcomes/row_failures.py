"""What rows of an executed step mean that are not OK: failures, and tokens yet to be sampled."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.outcomes.losses import Losses
from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import ROW_COMPUTED, RowStatus, RowWork, StepOutcome, StepPlan
from scheduler_service.core.request import (
    BoolArray,
    FinishReason,
    Int64Array,
    Sequence,
    SequenceStatus,
)

# So long a row is asked again and again for its first token.
MAX_UNSAMPLED_NS = 60 * 10**9
_NOT_COMPILED = f"the executor has not compiled its grammar in {MAX_UNSAMPLED_NS // 10**9} s"
_REASONS = {
    RowStatus.INVALID_LOGITS: "INVALID_LOGITS",
    RowStatus.FAILED: "ROW_FAILED",
    RowStatus.GRAMMAR_INVALID: "GRAMMAR_INVALID",
}


class RowFailures:
    """Ends the requests of failed rows, and asks again those whose grammar is being compiled."""

    def __init__(self, placement: Placement, losses: Losses) -> None:
        self._placement = placement
        self._losses = losses

    def take(self, plan: StepPlan, outcome: StepOutcome, statuses: Int64Array) -> BoolArray | None:
        """Takes `statuses` [R]; what leaned on failed rows is computed again.

        Returns [R], the rows that were to sample and did, or failed; None for all.
        """
        for index in np.flatnonzero(statuses == RowStatus.GRAMMAR_INVALID).tolist():
            self._end(plan, outcome, index, RowStatus.GRAMMAR_INVALID)
        self._take_unwritten(plan, outcome, statuses)
        return self._take_unsampled(plan.work, statuses)

    def _take_unwritten(self, plan: StepPlan, outcome: StepOutcome, statuses: Int64Array) -> None:
        """Rows of which nobody knows what they have written."""
        spoiled = {
            int(plan.work.stay_ids[index]): index
            for index, status in enumerate(statuses.tolist())
            if status not in ROW_COMPUTED and not self._is_over(plan.work, index, status)
        }
        if not spoiled:
            return
        # Whoever read what another row failed to write is not to blame for what it made of it.
        readers = self._losses.readers_of(plan, set(spoiled)) if len(spoiled) > 1 else set()
        for stay_id, index in spoiled.items():
            status = RowStatus(int(statuses[index]))
            if stay_id not in readers and status is not RowStatus.INPUT_UNAVAILABLE:
                self._end(plan, outcome, index, status)
        self._losses.lose_rows(plan, spoiled)

    def _is_over(self, work: RowWork, index: int, status: int) -> bool:
        """Whether a row has no input as its sequence has ended, or was lost with what it leans on.

        Nobody reads what it was to write: it lies behind all that is known of the sequence.
        """
        is_without_input = status == RowStatus.INPUT_UNAVAILABLE
        return is_without_input and self._sequence_of(work, index) is None

    def _take_unsampled(self, work: RowWork, statuses: Int64Array) -> BoolArray | None:
        """Rows that compute their last token once more, for a token."""
        is_repeated: BoolArray = statuses == RowStatus.NOT_SAMPLED
        indexes = np.flatnonzero(is_repeated).tolist()
        if not indexes:
            return work.samples
        for index in indexes:
            sequence = self._sequence_of(work, index)
            if sequence is None:
                continue
            if sequence.status is SequenceStatus.RUNNING:
                now_ns = self._placement.now_ns
                if self._placement.rows.repeat_last(sequence.row_id, now_ns) > MAX_UNSAMPLED_NS:
                    error = ("ROW_FAILED", _NOT_COMPILED)
                    self._placement.finish(sequence.request, FinishReason.ERROR, error)
            elif sequence.status is SequenceStatus.SWAPPED:
                sequence.num_computed -= 1
        return ~is_repeated if work.samples is None else work.samples & ~is_repeated

    def _end(self, plan: StepPlan, outcome: StepOutcome, index: int, status: RowStatus) -> None:
        """Ends the request of a row, if it is still there."""
        sequence = self._sequence_of(plan.work, index)
        if sequence is not None:
            message = outcome.row_errors.get(index, "the executor could not compute it")
            error = (_REASONS[status], message)
            self._placement.finish(sequence.request, FinishReason.ERROR, error)

    def _sequence_of(self, work: RowWork, index: int) -> Sequence | None:
        return self._placement.sequence_of(int(work.row_ids[index]), int(work.stay_ids[index]))
