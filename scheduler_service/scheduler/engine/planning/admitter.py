"""Which requests begin in a step: first preempted ones, then those that wait.

The queue policy says who is next. A request that cannot begin now does not block others for ever,
nor is it passed by others for ever: one that lacks a slot for its adapter, bytes, or (where the
policy allows it) blocks, rows or its tenant's share of these, may be passed by MAX_BYPASSES
requests; then those wait for it that would take what it lacks. All requests take blocks and rows,
but only those with an adapter keep a slot. Where the policy does not allow it, no request takes
bytes that comes after one that lacks some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from scheduler_service.scheduler.engine.blocks.prefix_cache import PrefixHit
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.planning.arrival_checks import prepare_request
from scheduler_service.scheduler.engine.planning.batch_policy import StepShape
from scheduler_service.scheduler.engine.planning.lateness import Lateness
from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES, Room
from scheduler_service.scheduler.engine.planning.rows import PromptLimit, RunningRows
from scheduler_service.scheduler.engine.sequences import Endings
from scheduler_service.scheduler.queue.ordered_queue import OpenLanes
from scheduler_service.scheduler.queue.waiting_queue import Waiting
from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.request import (
    FinishReason,
    Request,
    RequestStatus,
    Sequence,
    SequenceStatus,
)

# How many blocked requests a step looks past; bounds the work of a step.
_MAX_BLOCKED = 16
# How many waiting requests are looked at while an engine is full: two that may have a turn, and the
# most urgent one.
_MAX_LOOKED_AT_WHEN_FULL = 3
_PASSABLE = frozenset(
    {AdmissionBlocker.BLOCKS, AdmissionBlocker.ROWS, AdmissionBlocker.BYTES, AdmissionBlocker.SHARE}
)
_NO_ADAPTER = frozenset({""})


@dataclass(slots=True)
class Budget:
    """What is left of a step. `is_untouched`: nothing else is in it yet.

    `num_reserved`: tokens for running rows that go before whoever is to be admitted. `may_preempt`:
    others may be preempted for it. `prompts`: how much of it prompts may take, if that is limited.
    """

    num_tokens: int
    splits_prompts: bool
    is_untouched: bool = True
    num_reserved: int = 0
    may_preempt: bool = True
    prompts: PromptLimit | None = None

    @property
    def num_left(self) -> int:
        """Tokens for whoever is to be admitted."""
        return self.num_tokens - self.num_reserved

    def spend(self, num_tokens: int) -> None:
        """These tokens are in the step."""
        self.num_tokens -= num_tokens
        self.is_untouched = self.is_untouched and num_tokens == 0


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Requests that a waiting request may overtake: a preempted one, or less urgent rows."""

    preempted: Request | None
    is_of_rows: bool = False
    runs_decodes: bool = True


class Admitter:
    """Gives rows to preempted and waiting requests, and tokens of the step."""

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        running_rows: RunningRows,
        lateness: Lateness,
        endings: Endings,
    ) -> None:
        self._config = config
        self._placement = placement
        self._room = Room(config, placement)
        self._running_rows = running_rows
        self._lateness = lateness
        self._endings = endings
        self._queue = placement.queue
        self._pool_bypasses = MAX_BYPASSES if self._queue.allows_bypasses else 0
        # The adapters of whoever may pass those that lack a slot.
        self._lanes = OpenLanes()
        # Whether bytes that are left are for whoever was first to lack some.
        self._keeps_bytes = False

    # -- one request -------------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Prepares a waiting request for this engine; ends it if it has all its tokens.

        It has them if it was resumed with them, or if its sequences end sooner on this engine.
        """
        if request.prepared_for is not self._config:
            prepare_request(request, self._config)
        if request.unfinished:
            # Even so: another engine may have looked for its prefix since.
            self._placement.blocks.prefixes.adopt(request.unfinished[0])
        for resumed in request.unfinished:
            if resumed.num_output_tokens > 0 and request.params.beam is None:
                self._endings.finish_if_stopped(resumed)

    def takes_over(self, request: Request) -> bool:
        """Returns whether a waiting request would leave too little here to other tenants."""
        return self._room.takes_over(request)

    def _find_room(self, request: Request, *, may_preempt: bool) -> PrefixHit | AdmissionBlocker:
        """Returns what exists of a request that can have a row and blocks now, or what it lacks.

        `may_preempt`: running requests make way for it, if that is what it lacks.
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
        # Those that made way may have held what was found, or still wait for results.
        hit = prefixes.find(leader)
        if self._room.find_blocker(request, leader, hit) is not None:
            return AdmissionBlocker.BLOCKS_ON_THEIR_WAY
        return hit

    def _find_early_blocker(
        self, request: Request, *, may_preempt: bool
    ) -> AdmissionBlocker | None:
        """Returns what keeps a request out whatever is found in the caches; prepares it if nothing.

        Most that are looked at in vain end here, so this is to be cheap.
        """
        if not self._placement.suspects.may_run(request):
            return AdmissionBlocker.OTHERS_FIRST
        if self._room.has_yielded(request):
            return AdmissionBlocker.SHARE
        if not self._placement.is_settled(request):
            return AdmissionBlocker.RESULTS
        if not self._room.has_adapter_slot(request):
            return AdmissionBlocker.ADAPTER_SLOT
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

    def _start(self, request: Request, hit: PrefixHit) -> None:
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
            self._queue.begun(request, len(leader.token_ids) - hit.num_tokens)
        placement.start(leader, hit)

    # -- a step ------------------------------------------------------------------------------------

    def admit_urgent(
        self, shape: StepShape, budget: Budget, waiting: Waiting
    ) -> list[tuple[int, int]]:
        """Gives rows to waiting requests for which less urgent rows yield tokens of the step.

        What rows want that are as urgent is reserved. Returns (row id, tokens to compute) of each.
        """
        admitted: list[tuple[int, int]] = []
        rows = self._running_rows
        can_yield = rows.has_classes and not self._placement.draft.has_preempted
        if not can_yield or not shape.takes_waiting:
            return admitted
        self._lanes.adapters = None
        first = next(self._candidates(waiting), None)
        if first is None or not rows.may_yield_to(self._queue.step_class(first)):
            return admitted
        num_tokens = len(first.sequence.token_ids)
        num_others = budget.num_tokens - rows.num_wanted(decodes=shape.runs_decodes)
        if num_others < num_tokens:
            # Others are preempted after their work was chosen, if that leaves a token.
            budget.may_preempt = num_others <= 0
            ahead = _Ahead(self._first_preempted, is_of_rows=True, runs_decodes=shape.runs_decodes)
            self._admit_waiting(waiting, budget, admitted, [], ahead)
        budget.num_reserved, budget.may_preempt = 0, True
        return admitted

    def admit(self, shape: StepShape, budget: Budget, waiting: Waiting) -> list[tuple[int, int]]:
        """Gives rows to preempted and waiting requests: (row id, tokens to compute) of each row.

        Preempted ones go first, but for waiting ones that are urgent enough to preempt them.
        """
        admitted: list[tuple[int, int]] = []
        self._room.begin_step()
        is_divided = self._room.is_divided
        # What somebody just gave up is for those that run, and for tenants of whom nobody yielded.
        if self._placement.draft.has_preempted and not is_divided:
            return admitted
        first = self._first_preempted
        if shape.takes_waiting and first is not None and not is_divided:
            self._lanes.adapters = None
            if self._admit_waiting(waiting, budget, admitted, [], _Ahead(first)):
                return admitted
        self._lanes.adapters = None
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
        self._lanes.adapters = None
        first = next(self._candidates(waiting), None)
        if first is None or not self._room.is_divided:
            return first is not None and self._queue.may_preempt(first, swapped)
        self._room.begin_step()
        returning = self._first_to_return
        return returning is None or self._queue.may_pass(first, returning)

    @property
    def _first_preempted(self) -> Request | None:
        return next(filter(self._placement.suspects.may_run, self._placement.preempted), None)

    @property
    def _first_to_return(self) -> Request | None:
        """The first preempted request that does not wait for others of its tenant to leave."""
        preempted = filter(self._placement.suspects.may_run, self._placement.preempted)
        return next((each for each in preempted if not self._room.exceeds_share(each)), None)

    # -- preempted ---------------------------------------------------------------------------------

    def _bring_back(
        self, shape: StepShape, budget: Budget, admitted: list[tuple[int, int]]
    ) -> tuple[Request | None, list[Request]]:
        """Gives rows to preempted requests, by rank.

        Returns the first that others have to wait for, except those that the policy lets pass it;
        and the ones that any other may pass.
        """
        stuck: Request | None = None
        passed: list[Request] = []
        for request in filter(self._placement.suspects.may_run, self._placement.preempted.copy()):
            is_swapped = request.status is RequestStatus.SWAPPED
            if not is_swapped and not shape.takes_waiting:
                continue  # its prompt is not for this step
            if not self._room.has_adapter_slot(request):
                self._lanes.adapters = _NO_ADAPTER
            adapters, adapter = self._lanes.adapters, request.scheduling.adapter
            is_closed = adapters is not None and adapter not in adapters
            # Others of its tenant run, and it comes when they leave.
            if is_closed or self._room.exceeds_share(request):
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

    def _swap_in(
        self,
        request: Request,
        shape: StepShape,
        budget: Budget,
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
        self, request: Request, budget: Budget, admitted: list[tuple[int, int]]
    ) -> AdmissionBlocker | None:
        """Has a preempted request computed again, as far as its KV is not cached."""
        if budget.num_left <= 0:
            return AdmissionBlocker.BUDGET
        if self._lateness.cannot_meet(request):
            return None if request.is_finished else AdmissionBlocker.BUDGET
        self._keeps_bytes = False
        blocker = self._try_to_admit(request, budget, admitted)
        if blocker is AdmissionBlocker.POOL:
            self._fail(request, "KV_CACHE_EXHAUSTED", "it outgrew the whole KV cache")
            return None
        if blocker is not None:
            self._placement.draft.lacks[request] = blocker
        return blocker

    # -- waiting -----------------------------------------------------------------------------------

    def _admit_waiting(
        self,
        waiting: Waiting,
        budget: Budget,
        admitted: list[tuple[int, int]],
        passed: list[Request],
        ahead: _Ahead | None = None,
    ) -> bool:
        """Begins waiting requests while they fit; returns whether all have to wait for one.

        `passed`: preempted requests that any other may pass. `ahead`: what they go ahead of; who
        may not do that stays.
        """
        if budget.num_left <= 0 or self._is_full_for(waiting):
            return False
        blocked: list[Request] = []
        self._keeps_bytes = False
        for request in self._hopeful(waiting, budget, admitted, ahead):
            blocker = self._try_to_admit(request, budget, admitted)
            if blocker is not None:
                self._placement.draft.lacks[request] = blocker
            if blocker is AdmissionBlocker.POOL:
                self._fail(request, "KV_CACHE_EXHAUSTED", "it outgrew the whole KV cache")
            elif blocker is None:
                self._placement.draft.lacks.pop(request, None)
                for each in (*blocked, *passed):
                    each.num_bypasses += 1
                if self._room.keeps_last_row or (self._room.is_full and not self._queue.preempts):
                    break
            elif waiting.waits_here(request) and self._must_all_wait(request, blocker):
                return True
            else:
                blocked.append(request)
                # Who was preempted for those behind it would come back before them all.
                budget.may_preempt &= not request.is_protected
                if len(blocked) == _MAX_BLOCKED:
                    break
        return False

    def _is_full_for(self, waiting: Waiting) -> bool:
        """Returns whether no free row or block is left for any waiting request.

        Looks at the first of them only where one may preempt others or take a row that is kept.
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
        budget: Budget,
        admitted: list[tuple[int, int]],
        ahead: _Ahead | None,
    ) -> Iterator[Request]:
        """Candidates as long as there are tokens for them; who is late is ended on the way."""
        for request in self._candidates(waiting):
            if ahead is not None and not self._goes_ahead(request, ahead, budget, admitted):
                return
            if budget.num_left <= 0 or self._placement.is_full_of_suspects:
                return
            # What is looked at in vain is mostly neither of these, and need not be prepared.
            is_resumed = any(s.num_output_tokens for s in request.sequences)
            if self._queue.refuses_late or is_resumed or request.trial_size:
                self.prepare(request)
            if request.is_finished:
                continue
            if request.trial_size:
                # It is tried apart, by this engine.
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

    def _must_all_wait(self, request: Request, blocker: AdmissionBlocker) -> bool:
        """Whether nobody may pass a request that lacks something; closes the lanes of some."""
        if blocker is AdmissionBlocker.BYTES and not self._queue.allows_bypasses:
            self._keeps_bytes = True
            return request.num_bypasses >= MAX_BYPASSES
        if blocker is AdmissionBlocker.SHARE:
            return False  # it begins when others of its tenant leave
        if blocker is not AdmissionBlocker.ADAPTER_SLOT:
            is_overdue = request.num_bypasses >= self._pool_bypasses
            return blocker not in _PASSABLE or (
                is_overdue and not self._room.waits_for_its_own(request)
            )
        # It gets a slot when all who use one have left it.
        is_next = request.num_bypasses >= MAX_BYPASSES
        self._lanes.adapters = _NO_ADAPTER if is_next else {"", *self._placement.adapters}
        return False

    def _goes_ahead(
        self, request: Request, ahead: _Ahead, budget: Budget, admitted: list[tuple[int, int]]
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
        self, request: Request, budget: Budget, admitted: list[tuple[int, int]]
    ) -> AdmissionBlocker | None:
        """Begins a waiting or preempted request; returns the blocker if it cannot run."""
        found = self._find_room(request, may_preempt=budget.may_preempt)
        if isinstance(found, AdmissionBlocker):
            return found
        # Asked last: whoever lacks something else does not take the turn of others.
        num_most = self._num_prompt_tokens(request, budget)
        if num_most <= 0:
            return AdmissionBlocker.SHARE
        leader = request.unfinished[0]
        if not self._fits(len(leader.token_ids) - found.num_tokens, budget):
            return AdmissionBlocker.BUDGET
        self._start(request, found)
        num_tokens = self._spend(leader, budget, admitted, num_most)
        if budget.prompts is not None:
            budget.prompts.take(request, num_tokens)
        return None

    def _num_prompt_tokens(self, request: Request, budget: Budget) -> int:
        """The most that a waiting request may compute in this step."""
        if budget.prompts is None:
            return budget.num_left
        is_overdue = request.num_bypasses >= MAX_BYPASSES
        return min(budget.num_left, budget.prompts.num_for(request, is_overdue=is_overdue))

    def _fits(self, num_pending: int, budget: Budget) -> bool:
        if budget.splits_prompts or num_pending <= budget.num_left:
            return True
        is_alone = budget.is_untouched and budget.num_reserved == 0
        return is_alone and num_pending > self._config.max_num_batched_tokens

    def _spend(
        self,
        sequence: Sequence,
        budget: Budget,
        admitted: list[tuple[int, int]],
        num_most: int | None = None,
    ) -> int:
        """Gives a row tokens of the step, `num_most` if there is a limit; returns how many."""
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
