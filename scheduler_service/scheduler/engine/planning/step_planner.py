"""Step planner: fills a step with work and builds its `StepPlan`."""

from __future__ import annotations

import numpy as np

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.planning.admitter import Admitter
from scheduler_service.scheduler.engine.planning.batch_policy import (
    QueueState,
    StepShape,
    make_batch_policy,
)
from scheduler_service.scheduler.engine.planning.lateness import DeadlineEnforcer
from scheduler_service.scheduler.engine.planning.rows import GrowingRows, RunningRows
from scheduler_service.scheduler.engine.planning.run_ahead import Drafting, RunAhead
from scheduler_service.scheduler.engine.planning.step_limits import (
    PromptLimit,
    PromptTokens,
    StepBudget,
    StepLimits,
)
from scheduler_service.scheduler.engine.preemption_costs import PreemptionCosts
from scheduler_service.scheduler.engine.sequences import SequenceEndings, Siblings
from scheduler_service.scheduler.engine.speculation import DraftTotals
from scheduler_service.scheduler.engine.step_time_model import StepTimeModel
from scheduler_service.scheduler.queue import Waiting
from scheduler_service.scheduler.values import (
    Feature,
    Int32Array,
    Int64Array,
    NewRow,
    RequestStatus,
    RowWork,
    SchedulerConfig,
    Sequence,
    StepOutcome,
    StepPlan,
)

_NO_ROWS = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)


class StepPlanner:
    """Fills a step: first with rows that run already, then with requests that get rows.

    `ask_again_at_ns`: time at which a step exists that was refused as too early; None for none. The
    caller sets it to None before each call.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        costs: PreemptionCosts,
        times: StepTimeModel,
        lateness: DeadlineEnforcer,
        siblings: Siblings,
        endings: SequenceEndings,
    ) -> None:
        self._config = config
        self._placement = placement
        self._costs = costs
        self._times = times
        self._growing = GrowingRows(config, placement, siblings)
        self._running = RunningRows(config, placement)
        self.admitter = Admitter(config, placement, self._running, lateness, endings)
        self._limits = StepLimits(config, placement, times)
        self._batch_policy = make_batch_policy(config)
        self._run_ahead = RunAhead(config, placement, times)
        self._drafting = Drafting(config, placement, self._run_ahead)
        self._encodes = Feature.CROSS_ATTENTION in config.features
        self.ask_again_at_ns: int | None = None

    @property
    def draft_totals(self) -> DraftTotals:
        """Counts of steps with draft tokens, and of draft tokens verified and accepted."""
        return self._drafting.totals

    def next_step(self, waiting: Waiting, *, is_snapshot: bool) -> StepPlan | None:
        """Returns the next step; None if there is nothing to do.

        Begins requests of `waiting`. `is_snapshot`: the step lists all rows.
        """
        draft = self._placement.draft
        self._drafting.look()
        while True:
            draft.yielded_tenants.clear()
            draft.blockers.clear()
            draft.wanted_adapters.clear()
            for shape in self._batch_policy.shapes(self._queue_state(waiting)):
                row_ids, num_new_tokens = self._fill(shape, waiting)
                if len(row_ids) and self._is_time_for(row_ids):
                    return self._plan(row_ids, num_new_tokens, waiting, is_snapshot=is_snapshot)
            if draft.moves:
                return self._plan(_NO_ROWS, _NO_TOKENS, waiting, is_snapshot=is_snapshot)
            # The preempted request may have been the only one that ran: try again.
            if not draft.has_preempted:
                return None

    def has_other_work(self, waiting: Waiting) -> bool:
        """Returns whether the engine has other work than the rows of the step planned last."""
        return not waiting.is_empty or self._run_ahead.has_work_besides_run()

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Learns the duration of steps from an executed one."""
        placement = self._placement
        began_ns = max(plan.planned_at_ns, placement.last_answered_at_ns)
        interval_us = (placement.now_ns - began_ns) / 1000
        self._times.observe(plan, outcome, interval_us)
        self._drafting.observe(plan, outcome, interval_us)

    def _is_time_for(self, row_ids: Int64Array) -> bool:
        """Returns False if the step only asks again for tokens that were not ready a moment ago.

        In that case sets `ask_again_at_ns`.
        """
        ask_at_ns = self._placement.rows.ask_at_ns(row_ids)
        if ask_at_ns <= self._placement.now_ns:
            return True
        self.ask_again_at_ns = min(ask_at_ns, self.ask_again_at_ns or ask_at_ns)
        return False

    def _queue_state(self, waiting: Waiting) -> QueueState:
        placement = self._placement
        if not placement.preempted and not self._config.delay_factor:
            return QueueState(not waiting.is_empty, 0, 0.0, self._costs.prefill_us)
        preempted = list(filter(placement.suspects.may_run, placement.preempted))
        num_swapped = sum(each.status is RequestStatus.SWAPPED for each in preempted)
        # A request preempted for recompute is a prompt, like a waiting request.
        has_prompts = len(preempted) > num_swapped or not waiting.is_empty
        if num_swapped and self.admitter.yields_to_waiting(waiting):
            num_swapped = 0
        waited_us = self._oldest_wait_us(waiting) if self._config.delay_factor else 0.0
        return QueueState(has_prompts, num_swapped, waited_us, self._costs.prefill_us)

    def _oldest_wait_us(self, waiting: Waiting) -> float:
        """Returns the longest wait of a prompt in us, queued or preempted; 0 if none waits."""
        preempted = self._placement.preempted
        since_ns = [e.queued_at_ns for e in preempted if e.status is RequestStatus.PREEMPTED]
        if waiting.waits_since_ns is not None:
            since_ns.append(waiting.waits_since_ns)
        return (self._placement.now_ns - min(since_ns)) / 1000 if since_ns else 0.0

    def _fill(self, shape: StepShape, waiting: Waiting) -> tuple[Int64Array, Int32Array]:
        """Returns rows of a step of this shape, and how many tokens each row computes."""
        # Also in a step without decodes: blocks that rows lack must not go to new requests.
        self._growing.grow()
        self._growing.join_siblings()
        limits, is_empty = self._limits, waiting.is_empty
        limits.begin(waiting, splits_prompts=shape.splits_prompts)
        if is_empty and not self._placement.preempted:
            num_tokens = self._config.max_num_batched_tokens
            return self._running.pick(num_tokens, decodes=shape.runs_decodes, limits=limits)
        budget = StepBudget(limits.num_tokens, shape.splits_prompts)
        admitted: list[tuple[int, int]] = []
        if not is_empty:
            admitted = self.admitter.admit_urgent(shape, budget, waiting)
            admitted = admitted or self._admit_short(shape, budget, waiting)
        row_ids, num_new_tokens = self._running.pick(
            budget.num_tokens,
            decodes=shape.runs_decodes,
            without=[row_id for row_id, _ in admitted],
            limits=limits,
        )
        rows = self._placement.rows
        stay_ids = rows.stay_ids[row_ids]
        budget.spend(int(num_new_tokens.sum()))
        if limits.prompts is not None:
            budget.prompts = self._prompt_limit(limits.prompts, row_ids, num_new_tokens)
        admitted += self.admitter.admit(shape, budget, waiting)
        # An urgent request may have preempted rows that were picked.
        is_there = rows.stay_ids[row_ids] == stay_ids
        columns = np.array(admitted, np.int64).reshape(-1, 2)
        return (
            np.concatenate([row_ids[is_there], columns[:, 0]]),
            np.concatenate([num_new_tokens[is_there], columns[:, 1].astype(np.int32)]),
        )

    def _admit_short(
        self, shape: StepShape, budget: StepBudget, waiting: Waiting
    ) -> list[tuple[int, int]]:
        """Begins a waiting request that is short beside running prompts that want all tokens."""
        limits, decodes = self._limits, shape.runs_decodes
        part = self._running.short_part(budget.num_tokens, decodes=decodes, limits=limits)
        return [] if part is None else self.admitter.admit_short(shape, budget, waiting, part)

    def _prompt_limit(
        self, tokens: PromptTokens, row_ids: Int64Array, num_new_tokens: Int32Array
    ) -> PromptLimit:
        """Returns the prompt tokens that these rows leave of the limit."""
        is_prompt = num_new_tokens > 1
        requests = [self._placement.rows.sequence(i).request for i in row_ids[is_prompt].tolist()]
        return PromptLimit(tokens, zip(requests, num_new_tokens[is_prompt].tolist(), strict=True))

    # -- the plan ------------------------------------------------------------------------------

    def _plan(
        self,
        row_ids: Int64Array,
        num_new_tokens: Int32Array,
        waiting: Waiting,
        *,
        is_snapshot: bool,
    ) -> StepPlan:
        placement = self._placement
        step_id = placement.last_planned_step_id + 1
        base_step_id: int | None = placement.last_planned_step_id
        new_sequences = list(placement.draft.new_rows.values())
        if is_snapshot:
            placement.rows.forget_samples()
            placement.draft.removed_row_ids.clear()
            new_sequences = placement.rows.running
            base_step_id = None
        new_rows = [self._new_row(sequence) for sequence in new_sequences]
        table_writes = placement.rows.take_table_writes([row.row_id for row in new_rows])
        drafts, num_run_on = self._drafting.drafts(row_ids, num_new_tokens), None
        if drafts is None or self._drafting.runs_on:
            most = self._drafting.most_run_ahead(row_ids)
            num_run_on = self._run_ahead.num_run_on(
                row_ids, num_new_tokens, waiting, most=most, drafts=drafts
            )
        if self._encodes:
            is_first = placement.rows.last_step_id[row_ids] == 0
            self._note_encoded(row_ids[is_first], step_id)
        work = placement.rows.plan_work(row_ids, num_new_tokens, step_id, num_run_on, drafts)
        work.reports_parts = self._config.reports_parts and num_run_on is not None
        self._publish_singles(work)
        draft = placement.blocks.take_draft()
        placement.last_planned_step_id = step_id
        return StepPlan(
            step_id,
            base_step_id,
            draft.removed_row_ids,
            new_rows,
            table_writes,
            draft.moves,
            work,
            draft.published,
            placement.now_ns,
            draft.notes,
            draft.blockers,
        )

    def _note_encoded(self, row_ids: Int64Array, step_id: int) -> None:
        """Notes that the encoder's input of these rows is encoded in a step, unless it was.

        `row_ids`: rows that no step had before.
        """
        placement = self._placement
        for row_id in row_ids.tolist():
            request = placement.rows.sequence(row_id).request
            if request.num_encoder_tokens and not request.is_encoded:
                request.is_encoded, request.encoded_in_step = True, step_id
                stay_id = int(placement.rows.stay_ids[row_id])
                placement.blocks.publish_cross(request, stay_id)

    def _new_row(self, sequence: Sequence) -> NewRow:
        rows, request, row_id = self._placement.rows, sequence.request, sequence.row_id
        block_table = rows.block_table(row_id)
        return NewRow(
            sequence,
            row_id,
            block_table[:0] if self._config.is_uncached else block_table.copy(),
            rows.known_tokens(row_id).copy(),
            tuple(request.cross_blocks),
            None if request.is_encoded else request.encoder_token_ids,
            None if request.is_encoded else request.encoder_features,
        )

    def _publish_singles(self, work: RowWork) -> None:
        """Publishes blocks that are filled by the last, single token of a prompt."""
        if len(work.token_ids) == 0:
            return
        is_single = (work.sampled_steps_back == 0) & (work.num_new_tokens == 1)
        starts = work.num_computed_tokens[is_single].tolist()
        for row_id, start in zip(work.row_ids[is_single].tolist(), starts, strict=True):
            self._placement.publish_chunk(row_id, start, 1)
