"""Requests without rows get them: first those that were swapped out, then those that wait.

Who is next is the queue policy's business. Nobody who cannot run now blocks others for ever, nor is
passed by others for ever: what lacks a slot for its adapter, bytes, or (where the policy allows it)
blocks, rows or its tenant's share of these, may be passed by MAX_BYPASSES requests; then those wait
for it that would take what it lacks. Everybody takes blocks and rows, but only who has an adapter
keeps a slot. Where the policy does not allow it, nobody takes bytes who comes after one that lacks
some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.lack import Lack
from scheduler_service.core.placement import Placement
from scheduler_service.core.planning.lateness import Lateness
from scheduler_service.core.planning.prompt_limit import PromptLimit
from scheduler_service.core.planning.room import MAX_BYPASSES, Room
from scheduler_service.core.planning.running_rows import RunningRows
from scheduler_service.core.policies.batch_policy import StepShape
from scheduler_service.core.policies.request_queue import Lanes
from scheduler_service.core.request import FinishReason, Request, Sequence, SequenceStatus

# How many blocked requests a step looks past; bounds the work of a step.
_MAX_BLOCKED = 16
_PASSABLE = frozenset({Lack.BLOCKS, Lack.ROWS, Lack.BYTES, Lack.SHARE})
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
    """Of whom a waiting request goes ahead: a swapped one, or rows that it takes tokens from."""

    swapped: Request | None
    is_of_rows: bool = False
    runs_decodes: bool = True


class Admitter:
    """Gives rows to swapped and waiting requests, and tokens of the step."""

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        running_rows: RunningRows,
        lateness: Lateness,
    ) -> None:
        self._config = config
        self._placement = placement
        self._room = Room(config, placement)
        self._running_rows = running_rows
        self._lateness = lateness
        self._policy = placement.waiting
        self._pool_bypasses = MAX_BYPASSES if self._policy.allows_bypasses else 0
        # The lanes of whoever may pass those that lack a slot; see `_admit_waiting`.
        self._lanes: Lanes = None
        # Whether bytes that are left are for whoever was first to lack some.
        self._keeps_bytes = False

    def admit_urgent(self, shape: StepShape, budget: Budget) -> list[tuple[int, int]]:
        """Gives rows to waiting requests for which less urgent rows yield tokens of the step.

        What rows want that are as urgent is reserved. Returns (row id, tokens to compute) of each.
        """
        admitted: list[tuple[int, int]] = []
        if self._placement.draft.has_preempted or not shape.takes_waiting:
            return admitted
        self._lanes = None
        first = next(self._candidates(), None)
        if first is None:
            return admitted
        num_tokens, rows = len(first.sequence.token_ids), self._running_rows
        if not rows.may_yield_to(self._policy.urgency(first)):
            return admitted
        num_others = budget.num_tokens - rows.num_wanted(decodes=shape.runs_decodes)
        if num_others < num_tokens:
            # Others are preempted after their work was chosen, if that leaves a token.
            budget.may_preempt = num_others <= 0
            ahead = _Ahead(self._first_swapped, is_of_rows=True, runs_decodes=shape.runs_decodes)
            self._admit_waiting(budget, admitted, ahead)
        budget.num_reserved, budget.may_preempt = 0, True
        return admitted

    def admit(self, shape: StepShape, budget: Budget) -> list[tuple[int, int]]:
        """Gives rows to swapped and waiting requests: (row id, tokens to compute) of each row.

        Swapped ones go first, but for waiting ones that are urgent enough to preempt them.
        """
        admitted: list[tuple[int, int]] = []
        self._room.begin_step()
        # What somebody just gave up is for those that run, and for tenants of whom nobody yielded.
        if self._placement.draft.has_preempted and not self._room.is_divided:
            return admitted
        self._lanes = None
        swapped = self._first_swapped
        is_divided = self._room.is_divided
        if shape.takes_waiting and swapped is not None and not is_divided:
            must_wait = self._admit_waiting(budget, admitted, _Ahead(swapped))
            if must_wait or not shape.takes_swapped:
                return admitted
        self._lanes = None
        swap_in = partial(self._swap_in, budget, admitted)
        stuck = swap_in() if shape.takes_swapped else self._first_to_return
        if shape.takes_waiting and (stuck is None or is_divided):
            ahead = None if stuck is None else _Ahead(stuck)
            self._admit_waiting(budget, admitted, ahead)
        return admitted

    @property
    def yields_to_waiting(self) -> bool:
        """Whether the first of the waiting goes before all that are swapped out."""
        swapped = self._first_swapped
        if swapped is None:
            return False
        self._lanes = None
        first = next(self._candidates(), None)
        if first is None or not self._room.is_divided:
            return first is not None and self._policy.may_preempt(first, swapped)
        self._room.begin_step()
        returning = self._first_to_return
        return returning is None or self._policy.may_pass(first, returning)

    @property
    def _first_swapped(self) -> Request | None:
        return next(filter(self._placement.suspects.may_run, self._placement.swapped), None)

    @property
    def _first_to_return(self) -> Request | None:
        """The first swapped request that does not wait for others of its tenant to leave."""
        swapped = filter(self._placement.suspects.may_run, self._placement.swapped)
        return next((s for s in swapped if not self._room.exceeds_share(s)), None)

    # -- swapped -------------------------------------------------------------------------------

    def _swap_in(self, budget: Budget, admitted: list[tuple[int, int]]) -> Request | None:
        """Brings swapped requests back, most urgent first.

        Returns the request that others have to wait for, except those that the policy lets pass.
        """
        placement, stuck = self._placement, None
        for request in filter(placement.suspects.may_run, placement.swapped.copy()):
            if not self._room.has_adapter_slot(request):
                self._lanes = _NO_ADAPTER
            is_closed = self._lanes is not None and request.scheduling.adapter not in self._lanes
            # Others of its tenant run, and it comes when they leave.
            if is_closed or self._room.exceeds_share(request):
                continue
            if stuck is not None and not self._policy.may_pass(request, stuck):
                continue
            if (
                budget.num_left <= 0
                or placement.draft.has_swapped_out
                or not self._room.can_swap_in(request)
            ):
                stuck = request
                if self._policy.shares is None:
                    return stuck
                continue
            placement.swap_in(request)
            for sequence in request.sequences:
                if sequence.status is SequenceStatus.RUNNING:
                    self._spend(sequence, budget, admitted)
        return stuck

    # -- waiting -------------------------------------------------------------------------------

    def _admit_waiting(
        self, budget: Budget, admitted: list[tuple[int, int]], ahead: _Ahead | None = None
    ) -> bool:
        """Moves requests from waiting to running while they fit; True if all have to wait for one.

        `ahead`: of whom they go ahead; who may not do that stays.
        """
        blocked: list[Request] = []
        self._keeps_bytes = False
        for request in self._hopeful(budget, admitted, ahead):
            lack = self._try_to_admit(request, budget, admitted)
            if lack is not None:
                self._placement.draft.lacks[request] = lack
            if lack is Lack.POOL:
                self._fail(request, "KV_CACHE_EXHAUSTED", "it outgrew the whole KV cache")
            elif lack is None:
                self._placement.draft.lacks.pop(request, None)
                for passed in blocked:
                    passed.num_bypasses += 1
            elif self._must_all_wait(request, lack):
                return True
            else:
                blocked.append(request)
                if len(blocked) == _MAX_BLOCKED:
                    break
        return False

    def _hopeful(
        self, budget: Budget, admitted: list[tuple[int, int]], ahead: _Ahead | None
    ) -> Iterator[Request]:
        """Candidates as long as there are tokens for them; who is late is ended on the way."""
        for request in self._candidates():
            if ahead is not None and not self._goes_ahead(request, ahead, budget, admitted):
                return
            if budget.num_left <= 0:
                return
            if not self._lateness.cannot_meet(request):
                yield request
            elif not request.is_finished:
                return

    def _candidates(self) -> Iterator[Request]:
        candidates = self._policy.candidates(self._placement.now_ns, self._open_lanes)
        suspects = self._placement.suspects
        return filter(suspects.may_run, candidates) if suspects else candidates

    def _open_lanes(self) -> Lanes:
        return self._lanes

    def _must_all_wait(self, request: Request, lack: Lack) -> bool:
        """Whether nobody may pass a request that lacks something; closes the lanes of some."""
        if lack is Lack.BYTES and not self._policy.allows_bypasses:
            self._keeps_bytes = True
            return request.num_bypasses >= MAX_BYPASSES
        if lack is Lack.SHARE:
            return False  # it begins when others of its tenant leave
        if lack is not Lack.ADAPTER_SLOT:
            is_overdue = request.num_bypasses >= self._pool_bypasses
            return lack not in _PASSABLE or (
                is_overdue and not self._room.waits_for_its_own(request)
            )
        # It gets a slot when all who use one have left it.
        is_next = request.num_bypasses >= MAX_BYPASSES
        self._lanes = _NO_ADAPTER if is_next else {"", *self._placement.adapters}
        return False

    def _goes_ahead(
        self, request: Request, ahead: _Ahead, budget: Budget, admitted: list[tuple[int, int]]
    ) -> bool:
        swapped = ahead.swapped
        if swapped is not None and not (
            self._policy.may_preempt(request, swapped) or self._policy.may_pass(request, swapped)
        ):
            return False
        if not ahead.is_of_rows:
            return True
        urgency = self._policy.urgency(request)
        if not self._running_rows.has_less_urgent(urgency):
            return False
        budget.num_reserved = self._running_rows.num_wanted(
            urgency, [row_id for row_id, _ in admitted], decodes=ahead.runs_decodes
        )
        return True

    def _try_to_admit(
        self, request: Request, budget: Budget, admitted: list[tuple[int, int]]
    ) -> Lack | None:
        """Admits a request if it can run; else says what it lacks."""
        placement = self._placement
        if (lack := self._what_lacks_at_once(request)) is not None:
            return lack
        leader = request.unfinished[0]
        hit = placement.blocks.prefixes.find(leader)
        lack = self._room.what_lacks(request, leader, hit)
        if lack is not None:
            if lack in (Lack.POOL, Lack.SHARE) or not budget.may_preempt:
                return lack
            if not self._room.make_way(request, leader, hit):
                return lack
            # Those that made way may have held what was found, or still wait for results.
            hit = placement.blocks.prefixes.find(leader)
            if self._room.what_lacks(request, leader, hit) is not None:
                return Lack.BLOCKS_ON_THEIR_WAY
        # Asked last: whoever lacks something else does not take the turn of others.
        num_most = self._num_prompt_tokens(request, budget)
        if num_most <= 0:
            return Lack.SHARE
        num_pending = len(leader.token_ids) - hit.num_tokens
        if not self._fits(num_pending, budget):
            return Lack.BUDGET
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(hit.num_tokens, leader.num_prompt_tokens)
            placement.tally.began(
                num_prompt_tokens=leader.num_prompt_tokens,
                num_cached=request.num_cached_tokens,
                num_on_host=len(hit.host_blocks) * self._config.block_size,
            )
        self._policy.admitted(request, num_pending)
        placement.start(leader, hit)
        num_tokens = self._spend(leader, budget, admitted, num_most)
        if budget.prompts is not None:
            budget.prompts.take(request, num_tokens)
        return None

    def _what_lacks_at_once(self, request: Request) -> Lack | None:
        """What a request lacks, however much room there is."""
        if self._room.has_yielded(request):
            return Lack.SHARE
        if not self._placement.is_settled(request):
            return Lack.RESULTS
        if not self._room.has_adapter_slot(request):
            return Lack.ADAPTER_SLOT
        if self._keeps_bytes and self._room.num_more_bytes(request) > 0:
            return Lack.BYTES
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
