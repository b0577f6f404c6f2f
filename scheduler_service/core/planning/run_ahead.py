"""How many tokens rows may get in one step by running on, while nothing else could be done."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement
from scheduler_service.core.plan import Drafts, StepOutcome, StepPlan
from scheduler_service.core.queue.waiting_queue import Waiting
from scheduler_service.core.request import Int32Array, Int64Array, SequenceStatus
from scheduler_service.core.row_columns import ONE

_NEWEST_WEIGHT = 0.2


class RunAhead:
    """Permits runs to steps of decodes; nobody is kept waiting by them for long.

    What such a step takes is known from those before: as often as its rows get a token, a turn.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        # What a turn takes, by a running average; 0 if that is not known.
        self._turn_us = 0.0

    def observe(self, plan: StepPlan, outcome: StepOutcome, interval_us: float) -> None:
        """Learns from an executed step; from `interval_us` if the executor tells no times."""
        num_rows, took_us = len(plan.work.row_ids), outcome.compute_us or interval_us
        if num_rows == 0 or plan.num_tokens > num_rows or took_us <= 0:
            return
        most = 1 if outcome.token_counts is None else int(outcome.token_counts.max())
        turn_us = took_us / max(most, 1)
        average = self._turn_us or turn_us
        self._turn_us = average + _NEWEST_WEIGHT * (turn_us - average)

    def num_run_on(
        self,
        row_ids: Int64Array,
        num_new_tokens: Int32Array,
        waiting: Waiting,
        *,
        most: int,
        drafts: Drafts | None,
    ) -> Int32Array | None:
        """How many tokens each row of a step may get by running on, [R]; None for none.

        `most`: with the one that it gets anyway.
        """
        most = min(most, self.most_tokens)
        if most <= 1 or len(row_ids) == 0 or not waiting.is_empty:
            return None
        if self._has_other_work(row_ids, num_new_tokens):
            return None
        rows = self._placement.rows
        num_slots = rows.run_limit[row_ids] - rows.num_computed[row_ids]
        if drafts is not None:
            num_slots -= drafts.counts
        num_run_on = np.minimum(num_slots, np.array(most, np.int32)) - ONE
        return num_run_on if np.count_nonzero(num_run_on) else None

    @property
    def most_tokens(self) -> int:
        """As many as take no longer than a step may."""
        if not self._config.runs_ahead or self._turn_us == 0.0:
            return 1
        placement = self._placement
        in_time = self._config.max_run_ahead_ms * 1000 / self._turn_us
        if placement.last_planned_step_id > placement.last_answered_step_id:
            # Whoever comes waits for the steps in flight, too.
            in_time /= 2
        return max(int(min(self._config.max_run_ahead, in_time)), 1)

    def _has_other_work(self, row_ids: Int64Array, num_new_tokens: Int32Array) -> bool:
        """Returns whether there is more to do than to go on with the tokens of these rows."""
        placement = self._placement
        rows = placement.rows
        if placement.preempted or placement.suspects:
            return True
        if rows.num_without_promise or int(num_new_tokens.max()) > 1:
            return True
        order = rows.order
        num_computed = rows.num_computed[order]
        pending = rows.num_tokens[order] - num_computed
        may_run = num_computed < rows.run_limit[order]
        if np.count_nonzero(may_run & (pending > 0)) != len(row_ids) or int(pending.max()) > 1:
            return True
        return any(
            sequence.status is SequenceStatus.WAITING
            for request in placement.groups.values()
            for sequence in request.sequences
        )
