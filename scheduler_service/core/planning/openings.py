"""What a core could begin soon: whoever has requests for several cores asks each.

Of use only as long as each core has a waiting queue of its own (`core/scheduler.py`). With one
queue for all engines nobody asks this any more: engines begin what they can.

A core that is given only what its next step may begin leaves the others where all can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.core.blocks.prefix_cache import NO_HIT
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement, num_rows_wanted
from scheduler_service.core.planning.beside import Beside
from scheduler_service.core.planning.prompt_limit import PromptTokens, is_again
from scheduler_service.core.planning.room import MAX_BYPASSES, Room
from scheduler_service.core.request import Request, RequestStatus

# What a request lacks that waits for others to leave; nobody counts on its beginning soon.
AWAITS_ROOM = frozenset(
    {
        AdmissionBlocker.BLOCKS,
        AdmissionBlocker.ROWS,
        AdmissionBlocker.BYTES,
        AdmissionBlocker.ADAPTER_SLOT,
        AdmissionBlocker.POOL,
    }
)
# A request that was just given begins with the next step, which mostly takes less than this.
_NEXT_STEP_NS = 500_000_000
_WITHOUT_ROWS = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED})
# Requests that may wait at a time for others to make way for them.
_MAX_YIELDED_TO = 4


class _RunningPrompts(NamedTuple):
    """Prompts in prefill: tokens left to compute, by tenant."""

    num_tokens: int
    tenants: frozenset[str]


@dataclass(slots=True)
class _First:
    """Requests that other tenants have to wait for, where tenants have shares.

    `tenants`: tenants of further ones, for which only these wait: they have the room themselves.
    """

    others: list[Request] = field(default_factory=list)
    tenants: set[str] = field(default_factory=set)


class Openings:
    """Compares a request with what there is, and with what requests that wait here will take.

    Requests that wait for room here do not count: others may pass them, as long as the policy and
    `planning/admitter.py` allow it.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._queue = placement.queue
        self._room = Room(config, placement)
        self._most_prompt_tokens = PromptTokens.of(config).num_most
        self._num_yielded_to = 0
        # Requests given since the last step was planned, and what others lacked for that step.
        self._num_given = 0
        self._planned_at_ns = 0
        self._lacks: Mapping[Request, AdmissionBlocker] = {}
        # Computed when somebody asks, and forgotten when something changes.
        self._beside: Beside | None = None
        self._prompts: _RunningPrompts | None = None
        self._going_first: _First | None = None

    def step_planned(self, lacks: Mapping[Request, AdmissionBlocker]) -> None:
        """A step was planned, for which waiting requests lacked what `lacks` says."""
        self._lacks = lacks
        self._num_yielded_to = self._num_given = 0
        self._planned_at_ns = self._placement.now_ns
        self.changed()

    def changed(self) -> None:
        """Requests or rows have changed otherwise than by `given`."""
        self._beside = self._prompts = self._going_first = None

    def given(self, request: Request) -> None:
        """A request waits for the next step."""
        self._num_given += 1
        if self._beside is not None:
            self._count(request, self._beside)

    @property
    def is_open(self) -> bool:
        """Whether some request could begin; the look that costs least."""
        return self.has_tokens_left and self.is_open_soon

    @property
    def has_tokens_left(self) -> bool:
        """Returns whether the next step has token budget left for some tenant."""
        return self._num_tokens_left(is_newcomer=self._room.is_divided) > 0

    @property
    def is_open_soon(self) -> bool:
        """Whether some request could begin once prompts are computed that keep others waiting."""
        placement = self._placement
        return (
            (self._queue.shares is not None or self._takes_others)
            and placement.num_unreserved_rows > self._waiting.num_rows
            and self.num_blocks_left > (placement.blocks.watermark if len(placement.rows) else 0)
        )

    @property
    def num_blocks_left(self) -> int:
        """Free blocks, except those that requests waiting for the next steps will take."""
        return self._placement.blocks.device.num_free - self._waiting.num_blocks

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are to be computed before somebody who comes now: of prompts, and of rows."""
        return self._running_prompts.num_tokens + self._waiting.num_tokens

    @property
    def nobody_waits(self) -> bool:
        """Whether a request would be the first to wait here."""
        return not self._placement.preempted and len(self._queue) == 0

    def what_lacks(self, request: Request) -> AdmissionBlocker | None:
        """What a request that fits lacks to begin with the next step, with nobody yielding.

        Of one that another core has no cached prefix counts: its hashes are that core's.
        """
        if not request.unfinished:
            return None  # it has all its tokens
        if self._num_tokens_for(request) <= 0 or self._is_held_up(request):
            return AdmissionBlocker.BUDGET
        if request.scheduling.tenant in self._first.tenants:
            return AdmissionBlocker.SHARE
        if not self._room.has_adapter_slot(request):
            return AdmissionBlocker.ADAPTER_SLOT
        self._room.begin_step()
        leader = request.unfinished[0]
        lack = self._room.find_blocker(request, leader, NO_HIT, self._waiting)
        if (
            lack in (AdmissionBlocker.BLOCKS, AdmissionBlocker.POOL)
            and request.status is RequestStatus.ABSENT
        ):
            prefixes = self._placement.blocks.prefixes
            prefixes.adopt(leader)
            lack = self._room.find_blocker(request, leader, prefixes.find(leader), self._waiting)
        # What can never run is the core's to say.
        return None if lack is AdmissionBlocker.POOL else lack

    def is_open_to(self, request: Request) -> bool:
        """Whether `request` may begin as far as only its tenant matters; the cheaper question."""
        if not request.unfinished or not self._room.is_divided:
            return True
        return (
            self._num_tokens_for(request) > 0
            and request.scheduling.tenant not in self._first.tenants
            and not self._room.exceeds_row_share(request, self._waiting)
            and not self._is_held_up(request)
        )

    def takes_over(self, request: Request) -> bool:
        """Whether `request` would leave too little of this core to other tenants."""
        return bool(request.unfinished) and self._room.takes_over(request, self._waiting)

    def has_requests_of(self, tenant: str) -> bool:
        """Returns whether a tenant has rows on this executor, or waits for one there."""
        rows_of_tenants = self._placement.rows_of_tenants
        return tenant in rows_of_tenants or self._waiting.rows_of_tenants[tenant] > 0

    def may_yield_to(self, request: Request) -> bool:
        """Whether somebody runs here who may have to make way for a request."""
        order = self._placement.rows.order
        if self._num_yielded_to >= _MAX_YIELDED_TO or len(order) == 0:
            return False
        least_urgent = self._placement.rows.sequence(int(order[-1])).request
        # Of the same class some take tokens of a step from others, but neither rows nor blocks.
        num_tokens_left = self._config.max_num_batched_tokens - self._running_prompts.num_tokens
        if num_tokens_left <= 0 and self._queue.step_class(request) < self._queue.step_class(
            least_urgent
        ):
            return True
        return self._queue.may_preempt(request, least_urgent)

    def yields_to(self, request: Request) -> None:
        """A request was given that others may have to make way for."""
        self._num_yielded_to += 1

    @property
    def movable(self) -> Iterator[Request]:
        """Requests that could as well wait elsewhere, preempted ones first."""
        return filter(self.is_movable, chain(self._placement.preempted, self._queue))

    @property
    def waits_since_ns(self) -> int | None:
        """Since when a request waits that the last step had no room for; None if none does.

        Where all have come since that step was planned: since when the first of them waits, but
        later by what a next step may take.
        """
        preempted = self._placement.preempted
        if preempted:
            return preempted[0].queued_at_ns
        first = next(iter(self._queue), None)
        return None if first is None else first.queued_at_ns + self._grace_ns(first)

    def has_waited_ns(self, request: Request, now_ns: int) -> int:
        """How long a request waits here; less what a next step may take if it came since."""
        return now_ns - request.queued_at_ns - self._grace_ns(request)

    def _grace_ns(self, request: Request) -> int:
        return _NEXT_STEP_NS if request.queued_at_ns > self._planned_at_ns else 0

    def is_movable(self, request: Request) -> bool:
        """Whether nothing of a request runs here, or is yet to come from a step in flight.

        Who is tried apart stays.
        """
        return (
            request.status in _WITHOUT_ROWS
            and self._placement.is_settled(request)
            and not request.trial_size
        )

    # -- who goes first ------------------------------------------------------------------------

    @property
    def _takes_others(self) -> bool:
        """Whether those that wait here leave anything to others, if tenants have no shares."""
        if self._placement.preempted:
            return False
        if len(self._queue) <= self._num_given:
            return True
        return not any(map(self._holds_up_others, self._queue))

    def _holds_up_others(self, request: Request) -> bool:
        """Whether nobody may pass a request that waits here: see `planning/admitter.py`."""
        may_be_passed = self._queue.allows_bypasses or not self._room.has_adapter_slot(request)
        return not may_be_passed or request.num_bypasses >= MAX_BYPASSES

    def _is_held_up(self, request: Request) -> bool:
        """Returns whether requests that wait on this executor hold back `request`."""
        if self._queue.shares is None:
            return not self._takes_others
        return not all(self._queue.may_pass(request, other) for other in self._first.others)

    @property
    def _first(self) -> _First:
        """Swapped requests and those that were passed often enough, where tenants have shares."""
        if self._going_first is None:
            self._going_first = found = _First()
            if self._queue.shares is None:
                return found
            self._room.begin_step()
            for request in chain(self._placement.preempted, self._overdue):
                is_waiting = request.status is RequestStatus.WAITING
                room = self._room
                if room.waits_for_its_own(request) if is_waiting else room.exceeds_share(request):
                    found.tenants.add(request.scheduling.tenant)
                else:
                    found.others.append(request)
        return self._going_first

    @property
    def _overdue(self) -> Iterator[Request]:
        """Requests that wait for room here and were passed by as many as may pass them."""
        return (each for each in self._queue if each.num_bypasses >= MAX_BYPASSES)

    # -- what others take ----------------------------------------------------------------------

    @property
    def _waiting(self) -> Beside:
        """What those take that wait here and lack nothing but their turn."""
        if self._beside is None:
            self._beside = Beside()
            for request in self._queue:
                self._count(request, self._beside)
        return self._beside

    def _count(self, request: Request, beside: Beside) -> None:
        lack = self._lacks.get(request)
        if lack in AWAITS_ROOM or is_again(request):
            return
        num_rows = num_rows_wanted(request)
        num_tokens = num_blocks = 0
        if request.unfinished:
            leader = request.unfinished[0]
            hit = self._placement.blocks.prefixes.find(leader)
            if lack is None and self._queue.allows_bypasses:
                # It may have been given to wait for room here: no step was planned since.
                lack = self._room.find_blocker(request, leader, hit, beside)
                if lack in AWAITS_ROOM:
                    return
            num_tokens = len(leader.token_ids) - hit.num_tokens
            num_blocks = num_rows * self._config.num_blocks_for(len(leader.token_ids))
        beside.rows_of_tenants[request.scheduling.tenant] += num_rows
        beside.num_tokens += num_tokens
        if lack is not AdmissionBlocker.SHARE:
            beside.num_blocks += num_blocks
            beside.num_rows += num_rows

    def _num_tokens_for(self, request: Request) -> int:
        tenant = request.scheduling.tenant
        is_newcomer = self._room.is_divided and not (
            tenant in self._running_prompts.tenants or self._waiting.rows_of_tenants[tenant]
        )
        return self._num_tokens_left(is_newcomer=is_newcomer)

    def _num_tokens_left(self, *, is_newcomer: bool) -> int:
        """Returns how many more prompt tokens fit into the next step.

        `is_newcomer`: those of a tenant without a prompt here, where tenants share a step: the
        prompts of others do not keep it waiting (see `planning/prompt_limit.py`).
        """
        num_most = self._config.max_num_batched_tokens
        num_here = self._running_prompts.num_tokens
        if is_newcomer:
            num_here = min(num_here, self._most_prompt_tokens)
        elif self._room.is_divided:
            num_most = self._most_prompt_tokens
        return num_most - num_here - self._waiting.num_tokens

    @property
    def _running_prompts(self) -> _RunningPrompts:
        if self._prompts is None:
            rows = self._placement.rows
            order = rows.order
            pending = rows.num_tokens[order] - rows.num_computed[order]
            is_prompt = pending > 1
            requests = (rows.sequence(i).request for i in order[is_prompt].tolist())
            tenants = frozenset(request.scheduling.tenant for request in requests)
            self._prompts = _RunningPrompts(int(pending[is_prompt].sum()), tenants)
        return self._prompts
