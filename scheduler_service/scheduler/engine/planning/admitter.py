"""Admission: gives rows, blocks and step tokens to preempted requests, then to waiting requests.

The queue policy orders the requests. A blocked request neither blocks others forever nor is passed
forever. A request that lacks an adapter slot, bytes or (where the policy allows bypasses) blocks,
rows or its tenant's share of these, may be passed by MAX_BYPASSES requests. After that, requests
that would take what it lacks wait for it. Every request takes blocks and rows, but only requests
with an adapter keep an adapter slot. Where the policy does not allow bypasses, no request behind
one that lacks bytes takes any bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from scheduler_service.scheduler.engine.blocks import PrefixHit
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.planning.arrival_checks import prepare_request
from scheduler_service.scheduler.engine.planning.batch_policy import StepShape
from scheduler_service.scheduler.engine.planning.lateness import DeadlineEnforcer
from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES, Room
from scheduler_service.scheduler.engine.planning.rows import RunningRows
from scheduler_service.scheduler.engine.planning.step_limits import ShortPart, StepBudget
from scheduler_service.scheduler.engine.sequences import SequenceEndings
from scheduler_service.scheduler.queue import OpenLanes, Waiting
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    FinishReason,
    Request,
    RequestStatus,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
)

# Most blocked requests that a step looks past; bounds the work of a step.
_MAX_BLOCKED = 16
# Most long requests that a short one is looked for behind.
_MAX_LONG = 8
# Waiting requests to look at while an engine is full: two that may have a turn and the most urgent.
_MAX_LOOKED_AT_WHEN_FULL = 3
_PASSABLE = frozenset(
    {AdmissionBlocker.BLOCKS, AdmissionBlocker.ROWS, AdmissionBlocker.BYTES, AdmissionBlocker.SHARE}
)
_NO_ADAPTER = frozenset({""})


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Competitors that a waiting request must outrank: a preempted request, or less urgent rows.

    `is_of_rows`: less urgent rows yield tokens of the step. `runs_decodes`: the step has decodes,
    whose tokens count among those that more urgent rows want.
    """

    preempted: Request | None
    is_of_rows: bool = False
    runs_decodes: bool = True


class Admitter:
    """Gives rows and tokens of the step to preempted and waiting requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        running_rows: RunningRows,
        lateness: DeadlineEnforcer,
        endings: SequenceEndings,
    ) -> None:
        self._config = config
        self._placement = placement
        self._room = Room(config, placement)
        self._running_rows = running_rows
        self._lateness = lateness
        self._endings = endings
        self._queue = placement.queue
        self._pool_bypasses = MAX_BYPASSES if self._queue.allows_bypasses else 0
        # Adapters of requests that may pass a request without an adapter slot.
        self._lanes = OpenLanes()
        # Whether the bytes left are kept for the first request that lacked bytes.
        self._keeps_bytes = False

    # -- one request -------------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Prepares a waiting request for this engine; ends it if it has all its tokens.

        A request has all its tokens if it was resumed with them, or if sequences end sooner on this
        engine.
        """
        if request.prepared_for is not self._config:
            prepare_request(request, self._config)
        if request.unfinished:
            # Also if prepared before: another engine may have looked for its prefix since.
            self._placement.blocks.prefixes.adopt(request.unfinished[0])
        for resumed in request.unfinished:
            if resumed.num_output_tokens > 0 and request.params.beam is None:
                self._endings.finish_if_stopped(resumed)

    def takes_over(self, request: Request) -> bool:
        """Returns whether a waiting request would leave too little here to other tenants."""
        return self._room.takes_over(request)

    def _find_room(self, request: Request, *, may_preempt: bool) -> PrefixHit | AdmissionBlocker:
        """Returns the prefix hit of a request that fits now, or what the request lacks.

        `may_preempt`: running requests may be preempted to make room.
        """
        blocker = self._find_early_blocker(request, may_preempt=may_preempt)
        if blocker is not None:
            return blocker
        leader, prefixes = request.unfinished[0], self._placement.blocks.prefixes
        hit = prefixes.find(leader)
        blocker = self._room.find_blocker(request, leader, hit)
        if blocker is None:
            return hit
        if blocker in (AdmissionBlocker.POOL, AdmissionBlocker.SHARE) or not may_preempt:
            return blocker
        if not self._room.make_way(request, leader, hit):
            return blocker
        # Preempted requests may have held the blocks of the hit, or still wait for results.
        hit = prefixes.find(leader)
        if self._room.find_blocker(request, leader, hit) is not None:
            return AdmissionBlocker.BLOCKS_ON_THEIR_WAY
        return hit

    def _find_early_blocker(
        self, request: Request, *, may_preempt: bool
    ) -> AdmissionBlocker | None:
        """Returns what keeps a request out whatever the caches hold; prepares it if nothing does.

        Must be cheap: most requests that are looked at without success end here.
        """
        if not self._placement.suspects.may_run(request):
            return AdmissionBlocker.OTHERS_FIRST
        if self._room.has_yielded(request):
            return AdmissionBlocker.SHARE
        if not self._placement.is_settled(request):
            return AdmissionBlocker.RESULTS
        blocker = self._room.find_adapter_blocker(request)
        if blocker is not None:
            return blocker
        blocker = self._room.find_row_blocker(request)
        if blocker is AdmissionBlocker.SHARE or (
            blocker is not None and not (may_preempt and self._queue.preempts)
        ):
            return blocker
        if request.request_id not in self._placement.requests:
            self.prepare(request)
        if self._keeps_bytes and self._room.num_more_bytes(request) > 0:
            return AdmissionBlocker.BYTES
        return None

    def _awaits_adapter(self, request: Request) -> bool:
        """Returns whether a request cannot begin because its adapter is not loaded; begins to load.

        Ends the request if the adapter cannot be loaded. Loading takes nothing that others need, so
        all others may begin meanwhile.
        """
        blocker, adapter = self._room.find_adapter_blocker(request), request.scheduling.adapter
        draft, slots = self._placement.draft, self._placement.adapter_slots
        if blocker is AdmissionBlocker.ADAPTER_FAILED:
            why = slots.failure(adapter, request.submitted_ns)
            self._fail(request, "ADAPTER_INVALID", f"adapter {adapter!r} cannot be loaded: {why}")
            return True
        if blocker is AdmissionBlocker.ADAPTER_LOAD:
            draft.blockers[request] = blocker
            # Others with this adapter wait for the same.
            self._lanes.closed_adapters = {*self._lanes.closed_adapters, adapter}
            if not slots.is_loading(adapter):
                self._placement.load_adapter(adapter)
            return True
        if blocker is None and adapter:
            draft.wanted_adapters.add(adapter)
        return False

    def _start(self, request: Request, hit: PrefixHit, *, is_beside: bool) -> None:
        """Allocates a row and blocks to a request that was found to fit; charges its tenant."""
        placement, leader = self._placement, request.unfinished[0]
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(hit.num_tokens, leader.num_prompt_tokens)
            placement.tally.began(
                num_prompt_tokens=leader.num_prompt_tokens,
                num_cached=request.num_cached_tokens,
                num_on_host=len(hit.host_blocks) * self._config.block_size,
            )
        if request in self._queue:
            num_uncached = len(leader.token_ids) - hit.num_tokens
            self._queue.begun(request, num_uncached, is_beside=is_beside)
        placement.start(leader, hit)

    # -- a step ------------------------------------------------------------------------------------

    def admit_urgent(
        self, shape: StepShape, budget: StepBudget, waiting: Waiting
    ) -> list[tuple[int, int]]:
        """Gives rows to waiting requests for which less urgent rows yield tokens of the step.

        Tokens wanted by rows that are at least as urgent are reserved. Returns (row id, number of
        tokens to compute) of each new row.
        """
        admitted: list[tuple[int, int]] = []
        rows = self._running_rows
        can_yield = rows.has_classes and not self._placement.draft.has_preempted
        if not can_yield or not shape.takes_waiting:
            return admitted
        self._open_lanes()
        first = next(self._candidates(waiting), None)
        if first is None or not rows.may_yield_to(self._queue.step_class(first)):
            return admitted
        num_tokens = len(first.sequence.token_ids)
        num_others = budget.num_tokens - rows.num_wanted(decodes=shape.runs_decodes)
        if num_others < num_tokens:
            # While tokens are left, preemption waits for `admit`, after the rows' work was chosen.
            budget.may_preempt = num_others <= 0
            ahead = _Ahead(self._first_preempted, is_of_rows=True, runs_decodes=shape.runs_decodes)
            self._admit_waiting(waiting, budget, admitted, [], ahead)
        budget.num_reserved, budget.may_preempt = 0, True
        return admitted

    def admit_short(
        self, shape: StepShape, budget: StepBudget, waiting: Waiting, part: ShortPart
    ) -> list[tuple[int, int]]:
        """Gives a row to one waiting request that is short beside the prompts that run.

        It must be first in the queue, unless the policy lets it pass others. Returns as `admit`.
        """
        admitted: list[tuple[int, int]] = []
        self._room.begin_step()
        self._open_lanes()
        if not shape.takes_waiting or self._placement.preempted or self._is_full_for(waiting):
            return admitted
        budget.num_reserved = budget.num_tokens - part.num_tokens
        budget.may_preempt, budget.is_beside, self._keeps_bytes = False, True, False
        passed: list[Request] = []
        for request in self._hopeful(waiting, budget, admitted, passed, None):
            if self._queue.step_class(request) > part.step_class:
                break
            if self._is_short(request, part):
                if self._try_to_admit(request, budget, admitted) is None:
                    for each in passed:
                        each.num_bypasses += 1
                break
            if request.num_bypasses >= self._pool_bypasses or len(passed) == _MAX_LONG:
                break
            passed.append(request)
        budget.num_reserved, budget.may_preempt, budget.is_beside = 0, True, False
        return admitted

    def _is_short(self, request: Request, part: ShortPart) -> bool:
        leader = request.unfinished[0]
        if len(leader.token_ids) <= part.max_pending:
            return True
        self.prepare(request)
        num_cached = self._placement.blocks.prefixes.find(leader).num_tokens
        return len(leader.token_ids) - num_cached <= part.max_pending

    def admit(
        self, shape: StepShape, budget: StepBudget, waiting: Waiting
    ) -> list[tuple[int, int]]:
        """Gives rows to preempted requests first, then to waiting requests.

        Waiting requests that are urgent enough to preempt a preempted request go before it. Returns
        (row id, number of tokens to compute) of each new row.
        """
        admitted: list[tuple[int, int]] = []
        self._room.begin_step()
        is_divided = self._room.is_divided
        # Room freed by preemption is for running requests, and for tenants that were not preempted.
        if self._placement.draft.has_preempted and not is_divided:
            return admitted
        first = self._first_preempted
        if shape.takes_waiting and first is not None and not is_divided:
            self._open_lanes()
            if self._admit_waiting(waiting, budget, admitted, [], _Ahead(first)):
                return admitted
        self._open_lanes()
        stuck, passed = self._bring_back(shape, budget, admitted)
        if shape.takes_waiting and (stuck is None or is_divided):
            ahead = None if stuck is None else _Ahead(stuck)
            self._admit_waiting(waiting, budget, admitted, passed, ahead)
        return admitted

    def yields_to_waiting(self, waiting: Waiting) -> bool:
        """Returns whether the first waiting request begins before swapped requests return."""
        swapped = next(filter(self._placement.suspects.may_run, self._placement.swapped), None)
        if swapped is None:
            return False
        self._open_lanes()
        if not self._room.is_divided:
            for request in self._candidates(waiting):
                if self._queue.may_preempt(request, swapped):
                    return True
                if not self._may_be_overtaken(request):
                    return False
            return False
        first = next(self._candidates(waiting), None)
        if first is None:
            return False
        self._room.begin_step()
        returning = self._first_to_return
        return returning is None or self._queue.may_pass(first, returning)

    def _open_lanes(self) -> None:
        self._lanes.adapters, self._lanes.closed_adapters = None, ()

    @property
    def _first_preempted(self) -> Request | None:
        return next(filter(self._placement.suspects.may_run, self._placement.preempted), None)

    @property
    def _first_to_return(self) -> Request | None:
        """First preempted request that does not wait for other requests of its tenant to end."""
        preempted = filter(self._placement.suspects.may_run, self._placement.preempted)
        return next((each for each in preempted if not self._room.exceeds_share(each)), None)

    # -- preempted requests ------------------------------------------------------------------------

    def _bring_back(
        self, shape: StepShape, budget: StepBudget, admitted: list[tuple[int, int]]
    ) -> tuple[Request | None, list[Request]]:
        """Gives rows to preempted requests, by rank.

        Returns the first preempted request that stays blocked, behind which others wait unless the
        policy lets them pass it, and the preempted requests that any request may pass.
        """
        stuck: Request | None = None
        passed: list[Request] = []
        for request in filter(self._placement.suspects.may_run, self._placement.preempted.copy()):
            is_swapped = request.status is RequestStatus.SWAPPED
            if not is_swapped and not shape.takes_waiting:
                continue  # this step computes no prompts
            # Over its tenant's share, the request returns when other requests of the tenant leave.
            if not self._has_lane(request) or self._room.exceeds_share(request):
                passed += [] if is_swapped else [request]
                continue
            if stuck is not None and not self._queue.may_pass(request, stuck):
                continue
            if is_swapped:
                blocker = self._swap_in(request, shape, budget, admitted)
            else:
                blocker = self._return(request, budget, admitted)
            if blocker is AdmissionBlocker.SHARE:
                passed.append(request)
            elif blocker is not None:
                stuck = request
                if self._queue.shares is None:
                    break
        return stuck, passed

    def _has_lane(self, request: Request) -> bool:
        """Returns whether a preempted request can have its adapter, and its lane is not closed."""
        if self._awaits_adapter(request):
            return False
        if self._room.find_adapter_blocker(request) is not None:
            self._lanes.adapters = _NO_ADAPTER
        adapters = self._lanes.adapters
        return adapters is None or request.scheduling.adapter in adapters

    def _swap_in(
        self,
        request: Request,
        shape: StepShape,
        budget: StepBudget,
        admitted: list[tuple[int, int]],
    ) -> AdmissionBlocker | None:
        placement = self._placement
        if not shape.takes_swapped or budget.num_left <= 0 or placement.draft.has_swapped_out:
            return AdmissionBlocker.BUDGET
        if not self._room.can_swap_in(request):
            return AdmissionBlocker.BLOCKS
        placement.swap_in(request)
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._spend(sequence, budget, admitted)
        return None

    def _return(
        self, request: Request, budget: StepBudget, admitted: list[tuple[int, int]]
    ) -> AdmissionBlocker | None:
        """Starts a preempted request again, to recompute KV that the prefix cache does not hold."""
        if budget.num_left <= 0:
            return AdmissionBlocker.BUDGET
        if self._lateness.cannot_meet(request):
            return None if request.is_finished else AdmissionBlocker.BUDGET
        self._keeps_bytes = False
        blocker = self._try_to_admit(request, budget, admitted)
        if blocker is AdmissionBlocker.POOL:
            self._fail(request, "KV_CACHE_EXHAUSTED", "the request outgrew the whole KV cache")
            return None
        if blocker is not None:
            self._placement.draft.blockers[request] = blocker
        return blocker

    # -- waiting requests --------------------------------------------------------------------------

    def _admit_waiting(
        self,
        waiting: Waiting,
        budget: StepBudget,
        admitted: list[tuple[int, int]],
        passed: list[Request],
        ahead: _Ahead | None = None,
    ) -> bool:
        """Begins waiting requests while they fit; returns whether all must wait for a blocked one.

        `passed`: preempted requests that any request may pass. `ahead`: what a waiting request has
        to overtake; the loop stops at the first request that may not.
        """
        if budget.num_left <= 0 or self._is_full_for(waiting):
            return False
        blocked: list[Request] = []
        self._keeps_bytes = False
        for request in self._hopeful(waiting, budget, admitted, blocked, ahead):
            blocker = self._try_to_admit(request, budget, admitted)
            if blocker is not None:
                self._placement.draft.blockers[request] = blocker
            if blocker is AdmissionBlocker.POOL:
                self._fail(request, "KV_CACHE_EXHAUSTED", "the request outgrew the whole KV cache")
            elif blocker is None:
                self._placement.draft.blockers.pop(request, None)
                for each in (*blocked, *passed):
                    each.num_bypasses += 1
                if self._room.keeps_last_row or (self._room.is_full and not self._queue.preempts):
                    break
            elif waiting.waits_here(request) and self._must_all_wait(request, blocker):
                return True
            else:
                blocked.append(request)
                # A request preempted for one behind it would come back before all of them.
                budget.may_preempt &= not request.is_protected
                if len(blocked) == _MAX_BLOCKED:
                    break
        return False

    def _is_full_for(self, waiting: Waiting) -> bool:
        """Returns whether no free row or block is left for any waiting request.

        Looks at the first waiting requests only where one may preempt running requests or take the
        last row, which is kept for other tenants.
        """
        if self._placement.is_full_of_suspects:
            return True
        rows, is_full = self._placement.rows, self._room.is_full
        if is_full and (not self._queue.preempts or len(rows) == 0):
            return True
        if not is_full and not self._room.keeps_last_row:
            return False
        for request in islice(self._candidates(waiting), _MAX_LOOKED_AT_WHEN_FULL):
            if not is_full and request.num_bypasses >= MAX_BYPASSES:
                return False
            if is_full and self._queue.may_preempt(request, rows.least_urgent.request):
                return False
        return True

    def _hopeful(
        self,
        waiting: Waiting,
        budget: StepBudget,
        admitted: list[tuple[int, int]],
        blocked: list[Request],
        ahead: _Ahead | None,
    ) -> Iterator[Request]:
        """Yields candidates while the step has tokens for them; ends late requests on the way.

        Adds to `blocked` requests that have the turn and that `ahead` keeps back.
        """
        for request in self._candidates(waiting):
            if ahead is not None and not self._goes_ahead(request, ahead, budget, admitted):
                if self._may_be_overtaken(request):
                    blocked.append(request)
                    continue
                return
            if budget.num_left <= 0 or self._placement.is_full_of_suspects:
                return
            # Most requests that are looked at without success are none of these: no preparation.
            is_resumed = any(s.num_output_tokens for s in request.sequences)
            if self._queue.refuses_late or is_resumed or request.trial_size:
                self.prepare(request)
            if request.is_finished or self._awaits_adapter(request):
                continue
            if request.trial_size:
                # This engine tries the suspect apart from other requests.
                self._queue.begun(request, 0)
                self._placement.adopt(request)
            elif not self._lateness.cannot_meet(request):
                yield request
            elif not request.is_finished:
                return

    def _candidates(self, waiting: Waiting) -> Iterator[Request]:
        candidates = waiting.candidates(self._lanes)
        suspects = self._placement.suspects
        return filter(suspects.may_run, candidates) if suspects else candidates

    def _may_be_overtaken(self, request: Request) -> bool:
        """Returns whether a request is first by its turn alone, and more urgent ones may pass it.

        Otherwise a request that is preempted for a more urgent one would return before that one,
        without end.
        """
        return self._queue.has_turn(request) and request.num_bypasses < self._pool_bypasses

    def _must_all_wait(self, request: Request, blocker: AdmissionBlocker) -> bool:
        """Returns whether no request may pass a blocked one; closes lanes of some adapters."""
        if blocker is AdmissionBlocker.BYTES and not self._queue.allows_bypasses:
            self._keeps_bytes = True
            return request.num_bypasses >= MAX_BYPASSES
        if blocker is AdmissionBlocker.SHARE:
            return False  # the request begins when others of its tenant leave
        if blocker is not AdmissionBlocker.ADAPTER_SLOT:
            is_overdue = request.num_bypasses >= self._pool_bypasses
            return blocker not in _PASSABLE or (
                is_overdue and not self._room.waits_for_its_own(request)
            )
        # An adapter slot becomes free when all requests that use its adapter have left.
        is_next = request.num_bypasses >= MAX_BYPASSES
        self._lanes.adapters = _NO_ADAPTER if is_next else {"", *self._placement.adapters}
        return False

    def _goes_ahead(
        self, request: Request, ahead: _Ahead, budget: StepBudget, admitted: list[tuple[int, int]]
    ) -> bool:
        preempted = ahead.preempted
        if preempted is not None and not self._queue.may_go_before(request, preempted):
            return False
        if not ahead.is_of_rows:
            return True
        step_class = self._queue.step_class(request)
        if not self._running_rows.has_less_urgent(step_class):
            return False
        budget.num_reserved = self._running_rows.num_wanted(
            step_class, [row_id for row_id, _ in admitted], decodes=ahead.runs_decodes
        )
        return True

    def _try_to_admit(
        self, request: Request, budget: StepBudget, admitted: list[tuple[int, int]]
    ) -> AdmissionBlocker | None:
        """Begins a waiting or preempted request; returns the blocker if it cannot run."""
        found = self._find_room(request, may_preempt=budget.may_preempt)
        if isinstance(found, AdmissionBlocker):
            return found
        # Checked last: a request that lacks something else must not use up the turn of others.
        num_most = self._num_prompt_tokens(request, budget)
        if num_most <= 0:
            return AdmissionBlocker.SHARE
        leader = request.unfinished[0]
        if not self._fits(len(leader.token_ids) - found.num_tokens, budget):
            return AdmissionBlocker.BUDGET
        num_to_encode = self._placement.blocks.num_to_encode(request)
        most = self._config.max_num_encoder_tokens
        if num_to_encode and budget.num_encoded and budget.num_encoded + num_to_encode > most:
            return AdmissionBlocker.BUDGET
        budget.num_encoded += num_to_encode
        self._start(request, found, is_beside=budget.is_beside)
        num_tokens = self._spend(leader, budget, admitted, num_most)
        if budget.prompts is not None:
            budget.prompts.take(request, num_tokens)
        return None

    def _num_prompt_tokens(self, request: Request, budget: StepBudget) -> int:
        """Returns the most tokens that a request may compute in this step."""
        if budget.prompts is None:
            return budget.num_left
        is_overdue = request.num_bypasses >= MAX_BYPASSES
        return min(budget.num_left, budget.prompts.num_for(request, is_overdue=is_overdue))

    def _fits(self, num_pending: int, budget: StepBudget) -> bool:
        if budget.splits_prompts or num_pending <= budget.num_left:
            return True
        is_alone = budget.is_untouched and budget.num_reserved == 0
        return is_alone and num_pending > self._config.max_num_batched_tokens

    def _spend(
        self,
        sequence: Sequence,
        budget: StepBudget,
        admitted: list[tuple[int, int]],
        num_most: int | None = None,
    ) -> int:
        """Gives a row tokens of the step, `num_most` at most if given; returns how many."""
        rows, row_id = self._placement.rows, sequence.row_id
        end = min(rows.num_tokens[row_id], rows.num_slots[row_id])
        if rows.num_computed[row_id] >= rows.run_limit[row_id]:
            return 0
        num_most = budget.num_left if num_most is None else num_most
        num_new_tokens = min(num_most, int(end - rows.num_computed[row_id]))
        if num_new_tokens > 0:
            budget.spend(num_new_tokens)
            start = int(rows.num_computed[row_id])
            self._placement.publish_chunk(row_id, start, num_new_tokens)
            admitted.append((row_id, num_new_tokens))
        return max(num_new_tokens, 0)

    def _fail(self, request: Request, reason: str, message: str) -> None:
        self._placement.finish(request, FinishReason.ERROR, (reason, message))
