"""Engine: the state of one executor, that is rows, blocks, preempted requests, steps in flight.

`plan_step` decides, `apply` learns from a result. An engine has no waiting queue: all engines share
one, and `plan_step` begins those of its requests that fit.

An engine is deterministic: no I/O, no randomness, and no clock but `tick`. There is no prefill
phase and no decode phase: in each step a sequence catches up from `num_computed` to `num_tokens`
under the token budget. Steps are pipelined: a token that a step in flight samples is *promised*,
and the next step may build on it. Where a row may get several tokens, the most that may come are
promised.
"""

from __future__ import annotations

from collections import Counter, deque

from scheduler_service.scheduler.engine.adapter_slots import AdapterSlots
from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.scheduler.engine.outcomes import (
    FailureRecovery,
    OutcomeChecks,
    PromisedTokenRollback,
    Results,
    StepParts,
    detach,
    evacuate,
    take_back,
)
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.planning import DeadlineEnforcer, Room, StepPlanner, fits
from scheduler_service.scheduler.engine.preemption_costs import PreemptionCosts
from scheduler_service.scheduler.engine.sequences import SequenceEndings, Siblings
from scheduler_service.scheduler.engine.speculation import DraftTotals
from scheduler_service.scheduler.engine.step_time_model import StepTimeModel
from scheduler_service.scheduler.queue import Waiting, WaitingQueue
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    ContractBroken,
    FinishReason,
    Request,
    SchedulerConfig,
    StepEvents,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
)


class Engine:
    """Running and preempted requests of one executor; `placement` says where each request is.

    `queue`: the waiting queue, shared by all engines. The queue orders requests and is told which
    have begun. `last_step_id`: the latest step that the current life of the executor was ever sent;
    steps are numbered on from it. Raises ValueError for an invalid configuration.
    """

    def __init__(self, config: SchedulerConfig, queue: WaitingQueue, last_step_id: int = 0) -> None:
        self._config = config
        times = StepTimeModel()
        self._costs = PreemptionCosts(config, times)
        self.placement = Placement(config, queue, self._costs, last_step_id)
        self._in_flight: deque[StepPlan] = deque()
        self._losses = FailureRecovery(self.placement, self._in_flight)
        self._parts = StepParts()
        self._checks = OutcomeChecks(config, self.placement, self._parts)
        siblings = Siblings(self.placement)
        endings = SequenceEndings(self.placement, siblings)
        shortfalls = PromisedTokenRollback(self.placement, self._in_flight)
        self._results = Results(
            config, self.placement, self._losses, endings, shortfalls, self._parts
        )
        self._lateness = DeadlineEnforcer(config, self.placement)
        self._planner = StepPlanner(
            config, self.placement, self._costs, times, self._lateness, siblings, endings
        )
        self._needs_snapshot = True
        self._is_closed = False
        self.num_steps = 0

    # -- state -------------------------------------------------------------------------------------

    @property
    def config(self) -> SchedulerConfig:
        """Configuration of the engine and limits of its executor."""
        return self._config

    @property
    def pools(self) -> tuple[BlockPool, BlockPool]:
        """Device pool and host pool, for inspection."""
        return self.placement.blocks.device, self.placement.blocks.host

    def has_adapter(self, adapter: str) -> bool:
        """Returns whether rows have an adapter, or the executor has loaded it or loads it now."""
        placement, slots = self.placement, self.placement.adapter_slots
        is_here = adapter in placement.adapters or adapter in slots.loaded
        return is_here or slots.is_loading(adapter)

    @property
    def adapter_slots(self) -> AdapterSlots:
        """Adapters that the executor has loaded or loads."""
        return self.placement.adapter_slots

    def load_ahead(self, adapter: str) -> bool:
        """Has the executor load an adapter that no request waits for, if there is a slot for it."""
        placement = self.placement
        answered = placement.last_answered_step_id
        if not self.adapter_slots.can_load(placement.kept_adapters, answered):
            return False
        placement.load_adapter(adapter)
        return True

    def adapter_loaded(self, adapter: str, why_not: str) -> None:
        """Takes the end of a load; `why_not`: why the adapter could not be loaded, else empty."""
        self._check_open()
        self.placement.adapter_slots.ended(adapter, why_not, self.placement.now_ns)

    @property
    def num_swapped(self) -> int:
        """Number of requests whose KV is in the host pool."""
        return len(self.placement.swapped)

    @property
    def num_preempted(self) -> int:
        """Number of preempted requests: swapped out, or to be recomputed."""
        return len(self.placement.preempted)

    @property
    def num_unfinished(self) -> int:
        """Number of requests of this engine."""
        return len(self.placement.requests)

    @property
    def preempted_request_ids(self) -> list[str]:
        """Ids of preempted requests, in the order in which they return."""
        return [request.request_id for request in self.placement.preempted]

    @property
    def movable_requests(self) -> list[Request]:
        """Preempted requests that no step in flight concerns and that are not suspects."""
        placement = self.placement
        preempted = placement.preempted
        return [r for r in preempted if placement.is_settled(r) and not r.trial_size]

    @property
    def num_free_rows(self) -> int:
        """Number of rows that no running request has or will need."""
        return self.placement.num_unreserved_rows

    @property
    def has_room(self) -> bool:
        """Whether a row and more blocks than the watermark are free, and few suspects wait."""
        placement = self.placement
        if placement.is_full_of_suspects:
            return False
        num_kept = placement.blocks.watermark if len(placement.rows) else 0
        return placement.num_unreserved_rows > 0 and self.num_free_blocks > num_kept

    def has_room_for(self, request: Request) -> bool:
        """Returns whether rows and blocks are free for a request that no step concerns."""
        placement = self.placement
        num_tokens = sum(len(sequence.token_ids) for sequence in request.unfinished)
        num_blocks = self._config.num_blocks_for(num_tokens) + placement.blocks.watermark
        return (
            self.fits(request)
            and placement.num_unreserved_rows >= request.num_rows_wanted
            and self.num_free_blocks >= num_blocks
        )

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that running prefills still have to compute."""
        rows = self.placement.rows
        order = rows.order
        pending = rows.num_tokens[order] - rows.num_computed[order]
        return int(pending[pending > 1].sum())

    def takes_over(self, request: Request) -> bool:
        """Returns whether a waiting request would leave too little here to other tenants."""
        return bool(request.unfinished) and self._planner.admitter.takes_over(request)

    def has_requests_of(self, tenant: str) -> bool:
        """Returns whether a tenant has rows here."""
        return tenant in self.placement.rows_of_tenants

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Ids of unfinished requests, in the order in which they first began here."""
        return list(self.placement.requests)

    @property
    def num_waiting(self) -> int:
        """Number of preempted requests that are to be recomputed."""
        return self.num_preempted - self.num_swapped

    @property
    def num_running(self) -> int:
        """Number of sequences with a row."""
        return len(self.placement.rows)

    @property
    def num_running_requests(self) -> int:
        """Number of requests of which some sequence has a row."""
        return len(self.placement.requests) - len(self.placement.preempted)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self.placement.tally.num_preemptions

    @property
    def draft_totals(self) -> DraftTotals:
        """Counts of steps with draft tokens, and of draft tokens verified and accepted."""
        return self._planner.draft_totals

    @property
    def num_free_blocks(self) -> int:
        """Number of device blocks without references."""
        return self.placement.blocks.device.num_free

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks that no swapped request refers to."""
        return self.placement.blocks.host.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Number of device blocks that the prefix cache can find."""
        return self.placement.blocks.device.num_published

    @property
    def num_in_flight(self) -> int:
        """Number of steps without a result."""
        return len(self._in_flight)

    @property
    def oldest_step_in_flight(self) -> int | None:
        """Id of the step whose result comes next; None if no step is in flight."""
        return self._in_flight[0].step_id if self._in_flight else None

    @property
    def last_step_id(self) -> int:
        """Id of the latest step planned."""
        return self.placement.last_planned_step_id

    @property
    def num_unfinished_tokens(self) -> int:
        """Number of tokens of all unfinished sequences; the load that a router compares."""
        rows = self.placement.rows
        return self.placement.num_queued_tokens + int(rows.num_known[rows.order].sum())

    @property
    def is_behind(self) -> bool:
        """Whether overdue requests are left for the next `plan_step` to end.

        Overdue requests end in portions, so that no step waits for all of them.
        """
        return self._lateness.is_behind

    @property
    def ask_again_at_ns(self) -> int | None:
        """Time in ns at which `plan_step` may find work without another event; None for never.

        Set while the only work is to repeat rows whose grammar was not compiled a moment ago.
        """
        return self._planner.ask_again_at_ns

    def oldest_rows(self) -> list[Request | None]:
        """Returns the request of each row of the step answered next; None where one has ended."""
        return self._losses.rows_of(self._in_flight[0]) if self._in_flight else []

    def checked(self, outcome: StepOutcome) -> StepOutcome:
        """Returns `outcome`, the next result, with rows that break the contract marked FAILED.

        Changes no state. Raises ContractBroken.
        """
        if self.oldest_step_in_flight != outcome.step_id:
            raise ContractBroken(f"unexpected result for step {outcome.step_id}")
        return self._checks.check(self._in_flight[0], outcome)

    # -- what a request costs here -----------------------------------------------------------------

    def fits(self, request: Request) -> bool:
        """Returns whether `request`, if it is valid, could ever run here."""
        return fits(request, self._config)

    def recompute_ns(self, num_tokens: int) -> int:
        """Returns the estimated time in ns to compute `num_tokens`; 0 before any measurement."""
        return self._costs.recompute_ns(num_tokens)

    def move_ns(self, num_blocks: int) -> int:
        """Returns the estimated time in ns to bring `num_blocks` from the host pool."""
        return self._costs.move_ns(num_blocks)

    # -- requests ----------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Sets the time in ns by which deadlines and waiting times are measured."""
        self.placement.now_ns = now_ns

    def prepare(self, request: Request) -> None:
        """Prepares a waiting request for this engine; a request that has all its tokens ends."""
        self._check_open()
        self._planner.admitter.prepare(request)

    def find_blocker(self, request: Request) -> AdmissionBlocker | None:
        """Returns what keeps a waiting or preempted request from a row now; None if nothing does.

        Changes no state. Does not consider that other requests could be preempted for this one.
        """
        return Room(self._config, self.placement).find_wait_reason(request)

    def adopt(self, request: Request) -> None:
        """Takes a suspect (`request.trial_size`) to try it apart; the queue must not have it."""
        self.prepare(request)
        if not request.is_finished:
            self.placement.adopt(request)

    def abort(self, request_id: str) -> Request | None:
        """Aborts a request, running or preempted, and returns it; None for an unknown id."""
        self._check_open()
        request = self.placement.requests.get(request_id)
        if request is not None:
            self.placement.finish(request, FinishReason.ABORTED)
        return request

    def withdraw(self, request_id: str) -> Request | None:
        """Removes a running or preempted request, so that it can move; None for an unknown id.

        Returns a copy like those of `evacuate`. No loss is counted, because no request caused this.
        Results of steps in flight are dropped, and the request is recomputed elsewhere.
        """
        self._check_open()
        request = self.placement.requests.get(request_id)
        if request is None:
            return None
        moved = detach(request, self.placement)
        self.placement.remove(request)
        return moved

    def evacuate(self) -> list[Request]:
        """Returns all requests, ready for the waiting queue, because the executor is lost.

        Returns copies with the tokens so far and without KV. Closes this engine: any later call
        raises RuntimeError. `was_in_flight` of a copy says whether a step in flight concerned the
        request.
        """
        self._check_open()
        self._is_closed = True
        return evacuate(self.placement, self.requests_in_flight)

    @property
    def requests_in_flight(self) -> set[str]:
        """Ids of requests that steps in flight compute, even if they have left since."""
        gone = {part.request_id for part in self.placement.departures.table_parts}
        return gone.union(
            request.request_id
            for plan in self._in_flight
            for request in self._losses.requests_of(plan)
        )

    def take_ended(self) -> StepEvents:
        """Returns what a decision has ended since the last call of `take_ended` or `apply`."""
        self._check_open()
        return self._add_ended(StepEvents())

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed: it has released its requests")

    # -- steps -------------------------------------------------------------------------------------

    def plan_step(self, waiting: Waiting) -> StepPlan | None:
        """Plans the next step; returns None if no row has anything to compute.

        Begins requests of `waiting`, in its order, as far as there is room.
        """
        self._check_open()
        self._planner.ask_again_at_ns = None
        if self._needs_snapshot and self._in_flight:
            return None
        self._lateness.refuse_overdue()
        had_suspects = bool(self.placement.suspects)
        plan = self._plan_in_turn(waiting) if had_suspects else self._plan(waiting)
        if plan is None and self.placement.suspects and not had_suspects:
            plan = self._plan_in_turn(waiting)  # planning found suspects in the queue
        if plan is not None:
            self._planner.ask_again_at_ns = None
        return plan

    def _plan_in_turn(self, waiting: Waiting) -> StepPlan | None:
        """Plans a trial of suspects, or a step of all other requests.

        A trial is planned only while no other step is in flight.
        """
        suspects = self.placement.suspects
        if suspects.is_trial_in_flight:
            return None
        request_ids = suspects.request_ids
        for turn in suspects.turns:
            if turn.is_trial and self._in_flight:
                return None
            with suspects.turn(turn):
                plan = self._plan(waiting)
            if plan is not None:
                # A step without rows only makes room for the trial, whose turn it still is.
                is_trial = turn.is_trial and len(plan.work.row_ids) > 0
                suspects.step_planned(plan.step_id, is_trial=is_trial)
                return plan
        if suspects.request_ids != request_ids:
            # Suspects have ended, for example at their deadline, or new ones were found: try again.
            return self._plan_in_turn(waiting) if suspects else self._plan(waiting)
        return None if self._in_flight else self._plan_any_trial(waiting)

    def _plan_any_trial(self, waiting: Waiting) -> StepPlan | None:
        """Plans a trial of any running suspect, where the suspects before it lack blocks.

        Without this all suspects could wait forever, as a later suspect may hold these blocks.
        """
        suspects = self.placement.suspects
        for request in suspects.running:
            with suspects.trial_of(request):
                plan = self._plan(waiting)
            if plan is not None:
                suspects.step_planned(plan.step_id, is_trial=True)
                return plan
        return None

    def _plan(self, waiting: Waiting) -> StepPlan | None:
        if self._runs_on and not self._planner.has_other_work(waiting):
            return None  # another step would end the run
        plan = self._planner.next_step(waiting, is_snapshot=self._needs_snapshot)
        if plan is not None:
            self._needs_snapshot = False
            self._in_flight.append(plan)
        return plan

    @property
    def _runs_on(self) -> bool:
        """Whether rows of the latest step run on until another step comes, for some more tokens."""
        if not self._in_flight or not self._in_flight[-1].work.reports_parts:
            return False
        num_left = self._parts.num_left if len(self._in_flight) == 1 else None
        return num_left is None or num_left > 1

    def take_part(self, part: StepPart) -> StepEvents:
        """Applies tokens of the oldest step in flight, whose result will have them, too.

        Ignores a part of a step that was answered. Raises ContractBroken. The caller charges the
        waiting queue for `StepEvents.num_sampled`.
        """
        self._check_open()
        events = StepEvents()
        if 0 < part.step_id <= self.placement.last_answered_step_id:
            return events
        if self.oldest_step_in_flight != part.step_id:
            raise ContractBroken(f"unexpected part of step {part.step_id}")
        plan = self._in_flight[0]
        self._parts.add(plan, part)
        num_reported = self._parts.taken
        try:
            faults = self._checks.faults_of_part(plan, part)
            self._results.take_part(plan, part, faults, events)
        except Exception:
            take_back(self.placement, plan, events, num_reported)
            raise
        return self._add_ended(events)

    def apply(self, outcome: StepOutcome) -> StepEvents:
        """Applies a result; results come in the order of the steps. Raises ContractBroken.

        The caller charges the waiting queue for `StepEvents.num_sampled`.
        """
        self._check_open()
        if not self._in_flight or self._in_flight[0].step_id != outcome.step_id:
            raise ContractBroken(f"unexpected result for step {outcome.step_id}")
        plan = self._in_flight[0]
        if plan.base_step_id is None and outcome.status is StepStatus.NEED_SNAPSHOT:
            raise ContractBroken(f"NEED_SNAPSHOT for step {plan.step_id}, which was a snapshot")
        if outcome.status is StepStatus.OK:
            outcome = self._checks.check(plan, outcome)
        self._in_flight.popleft()
        placement, events = self.placement, StepEvents()
        self.num_steps += 1
        if outcome.status is StepStatus.OK:
            self._costs.observe(
                num_moves=len(plan.moves),
                move_us=outcome.move_us,
                num_rows=len(plan.work.row_ids),
                num_tokens=plan.num_tokens,
                compute_us=outcome.compute_us,
            )
            self._lateness.observe(plan, outcome)
            self._planner.observe(plan, outcome)
            if placement.suspects:
                events.acquitted = self._losses.survive(plan, outcome.counts)
            try:
                self._results.take(plan, outcome, events)
            except Exception:
                # These events are lost: requests that go on elsewhere must get their tokens again.
                num_reported = self._parts.taken if self._parts else None
                take_back(placement, plan, events, num_reported)
                raise
        else:
            self._needs_snapshot |= outcome.status is not StepStatus.FAILED
            is_fruitless = outcome.status is not StepStatus.NEED_SNAPSHOT
            if is_fruitless:
                self._losses.fail_step(plan, is_refused=outcome.status is StepStatus.REFUSED)
            else:
                self._losses.lose_step(plan, is_fruitless=False)
        self._parts.clear()
        placement.suspects.step_answered(plan.step_id)
        placement.step_answered(plan.step_id)
        return self._add_ended(events)

    def _add_ended(self, events: StepEvents) -> StepEvents:
        placement = self.placement
        events.finished, placement.ended = placement.ended, []
        events.finished_sequences, placement.ended_sequences = placement.ended_sequences, []
        if placement.num_sampled:
            events.num_sampled, placement.num_sampled = placement.num_sampled, Counter()
        return events
