"""Draft tokens and run-ahead: which rows get several tokens in one step, and how many.

Rows with draft tokens are held back until all their tokens are known. *Running on* means that a row
samples several tokens in one step, one pass through the model after the other.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.row_columns import ONE, ZERO
from scheduler_service.scheduler.engine.speculation import (
    DraftTotals,
    PassTimes,
    PromptLookup,
    Proposer,
    choose_lengths,
)
from scheduler_service.scheduler.engine.step_time_model import StepTimeModel
from scheduler_service.scheduler.queue import Waiting
from scheduler_service.scheduler.values import (
    BoolArray,
    Drafts,
    Int32Array,
    Int64Array,
    SchedulerConfig,
    SequenceStatus,
    StepOutcome,
    StepPlan,
)

# For _WARM_TOKENS tokens after its last draft tokens, a row is expected to have some again. Till
# then it gets at most _WARM_RUN tokens in a step: more would often skip the next chance to guess.
_WARM_TOKENS = 32
_WARM_RUN = 4


class Drafting:
    """Asks a proposer for draft tokens, and uses them where that pays.

    Steps with prompts have no draft tokens: prompts use up the token budget, and while there are
    prompts no row is held back. `runs_on`: whether rows with the latest draft tokens run on behind
    them. `totals`: counts of draft tokens so far.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement, run_ahead: RunAhead) -> None:
        self._config = config
        self._placement = placement
        self._run_ahead = run_ahead
        self._times = PassTimes()
        self._proposer: Proposer | None = None
        if config.speculates:
            self._proposer = PromptLookup(placement.rows)
        # [N] int32: number of draft tokens that pay, as of the latest `look`.
        self._num_drafts = np.zeros(config.max_num_seqs, np.int32)
        # [N]: tokens known when the row last had draft tokens, and the stay that they belonged to.
        self._num_known_then = np.zeros(config.max_num_seqs, np.int32)
        self._stay_ids = np.zeros(config.max_num_seqs, np.int64)
        self._has_prompts = False
        self.runs_on = False
        self.totals = DraftTotals()

    def observe(self, plan: StepPlan, outcome: StepOutcome, interval_us: float) -> None:
        """Learns from an executed step.

        `interval_us`: time since the previous result, or since the step was planned if that is
        later.
        """
        work = plan.work
        if self._proposer is None or len(work.row_ids) == 0:
            return
        if work.drafts is not None:
            self.totals.take(work.drafts, outcome)
        if plan.num_tokens == len(work.row_ids) or work.drafts is not None:
            self._times.observe(plan, outcome, interval_us)

    def look(self) -> None:
        """Chooses how many draft tokens rows get now; may hold rows back. Begins each step."""
        proposer, rows = self._proposer, self._placement.rows
        if proposer is None or len(rows) == 0:
            return
        if rows.has_held_back:
            rows.is_held_back[:] = False
            rows.has_held_back = False
        guessed = proposer.look(rows.order)
        if self._has_prompts or self._placement.suspects:
            return
        if guessed:
            self._choose(proposer, np.array(guessed, np.int64))
        if not rows.has_held_back:
            self._wait_for_guesses()

    def _choose(self, proposer: Proposer, row_ids: Int64Array) -> None:
        """Sets how many draft tokens rows with guesses get; holds back rows that get some."""
        rows = self._placement.rows
        num_left = rows.stop_len[row_ids] - rows.num_tokens[row_ids]
        most = np.minimum(num_left - ONE, np.array(self._config.max_draft_tokens, np.int32))
        most = np.where(rows.promises[row_ids] > ZERO, np.maximum(most, ZERO), ZERO)
        chances = proposer.chances(row_ids.tolist(), self._config.max_draft_tokens)
        num_run_on = self._run_ahead.most_tokens - 1
        lengths = choose_lengths(chances, most, len(rows), num_run_on, self._times)
        if lengths is not None:
            self._num_drafts[row_ids] = lengths.counts
            rows.is_held_back[row_ids] = lengths.counts > ZERO
            rows.has_held_back = True
            self.runs_on = lengths.runs_on

    def _wait_for_guesses(self) -> None:
        """Holds back rows without a guess, if all rows may soon have one.

        A guess comes with the tokens of a step and is of use in the next step. A step planned
        before these tokens are known brings the very tokens that could have been guessed. If only
        some rows were held back while others go on, they would be in every other step only.
        """
        rows = self._placement.rows
        if self._run_ahead.most_tokens > 1 and self._are_warm(rows.order).all():
            self._num_drafts[rows.order] = 0
            rows.is_held_back[rows.order] = True
            rows.has_held_back = True

    def _are_warm(self, row_ids: Int64Array) -> BoolArray:
        """Returns which rows had draft tokens recently and may soon have a guess. [R] bool."""
        rows = self._placement.rows
        num_since = rows.num_tokens[row_ids] - self._num_known_then[row_ids]
        is_same = self._stay_ids[row_ids] == rows.stay_ids[row_ids]
        is_warm: BoolArray = is_same & (num_since < _WARM_TOKENS)
        return is_warm

    def most_run_ahead(self, row_ids: Int64Array) -> int:
        """Returns the most tokens per row that a step of these rows may bring by running on.

        A guess is noticed when tokens arrive. So rows that may soon have one get few tokens per
        step.
        """
        most = self._config.max_run_ahead
        if self._proposer is None or most <= 1 or self.totals.num_steps == 0:
            return most
        return min(most, _WARM_RUN) if self._are_warm(row_ids).any() else most

    def drafts(self, row_ids: Int64Array, num_new_tokens: Int32Array) -> Drafts | None:
        """Returns the draft tokens of the rows of a step; None if no row has any."""
        proposer, rows = self._proposer, self._placement.rows
        if proposer is None or len(row_ids) == 0:
            return None
        self._has_prompts = int(num_new_tokens.max()) > 1
        if self._has_prompts or not rows.has_held_back:
            return None
        num_computed, num_tokens = rows.num_computed[row_ids], rows.num_tokens[row_ids]
        if np.count_nonzero(num_tokens - num_computed > ONE):
            return None
        counts = np.where(rows.is_held_back[row_ids], self._num_drafts[row_ids], ZERO)
        counts[rows.num_known[row_ids] < num_tokens] = 0
        num_slots = rows.run_limit[row_ids] - num_computed - ONE
        counts = np.minimum(counts, np.maximum(num_slots, ZERO))
        num_left = self._config.max_num_batched_tokens - len(row_ids)
        counts = np.clip(num_left - (np.cumsum(counts) - counts), 0, counts).astype(np.int32)
        drafted = row_ids[counts > ZERO]
        self._stay_ids[drafted] = rows.stay_ids[drafted]
        self._num_known_then[drafted] = rows.num_known[drafted]
        parts = [
            proposer.propose(row_id, count)
            for row_id, count in zip(row_ids.tolist(), counts.tolist(), strict=True)
            if count
        ]
        return Drafts(counts, np.concatenate(parts)) if parts else None


# -- Run-ahead -------------------------------------------------------------------------------------


class RunAhead:
    """Lets rows of decode steps run on while there is no other work, for a limited time per step.

    Rows get one token per step until a step of decodes was measured.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement, times: StepTimeModel) -> None:
        self._config = config
        self._placement = placement
        self._times = times

    def num_run_on(
        self,
        row_ids: Int64Array,
        num_new_tokens: Int32Array,
        waiting: Waiting,
        *,
        most: int,
        drafts: Drafts | None,
    ) -> Int32Array | None:
        """Returns how many tokens each row of a step may get by running on, [R]; None for none.

        `most`: most tokens of a row in the step, the one it gets anyway included.
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
        """Most tokens per row that a step can bring within its time limit."""
        if not self._config.runs_ahead or not self._times.has_decodes:
            return 1
        placement = self._placement
        pass_us = self._times.decodes_us(len(placement.rows))
        in_time = self._config.max_run_ahead_ms * 1000 / pass_us
        is_behind = placement.last_planned_step_id > placement.last_answered_step_id
        if is_behind and not self._config.reports_parts:
            # A new request waits for the steps in flight, too.
            in_time /= 2
        return max(int(min(self._config.max_run_ahead, in_time)), 1)

    def _has_other_work(self, row_ids: Int64Array, num_new_tokens: Int32Array) -> bool:
        """Returns whether the engine has other work than decoding the next tokens of these rows."""
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
        return self._has_siblings_to_join

    @property
    def _has_siblings_to_join(self) -> bool:
        return any(
            sequence.status is SequenceStatus.WAITING
            for request in self._placement.groups.values()
            for sequence in request.sequences
        )

    def has_work_besides_run(self) -> bool:
        """Returns whether the engine has other work than the rows of the latest step, a run."""
        placement = self._placement
        rows = placement.rows
        if placement.preempted or placement.suspects or placement.draft.moves:
            return True
        in_run = rows.sampled_in_step[rows.order] == placement.last_planned_step_id
        is_run_alone = np.count_nonzero(in_run) == len(rows)
        return not is_run_alone or self._has_siblings_to_join
