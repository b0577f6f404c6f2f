"""Room for a request: rows, bytes, blocks, a slot for its adapter; and who yields to make some."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_service.scheduler.engine.blocks.block_manager import Allocation
from scheduler_service.scheduler.engine.blocks.prefix_cache import NO_HIT, PrefixHit
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.queue.queue_policy import HELD_PER_LEFT
from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import PreemptionCause
from scheduler_service.scheduler.values.request import ParamsSet, Request, RequestStatus, Sequence

MAX_BYPASSES = 64


@dataclass(slots=True)
class _Shortage:
    """What is yet to be freed for a request, negative where more than enough is free.

    `num_yielding`: how many of those that run with a set of parameters are to yield.
    """

    num_rows: int
    num_blocks: int
    num_bytes: int
    num_yielding: Counter[ParamsSet] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        """Whether everything is there."""
        return max(self.num_rows, self.num_blocks, self.num_bytes) <= 0

    def yields(self, victim: Request, num_blocks: int) -> None:
        """A running request is to yield, and `num_blocks` that it alone has."""
        self.num_rows -= victim.num_rows_wanted
        self.num_blocks -= num_blocks
        params_set = victim.params_set
        self.num_yielding[params_set] += 1
        if self.num_yielding[params_set] == params_set.num_running:
            self.num_bytes -= params_set.num_bytes

    def stays(self, victim: Request, num_blocks: int) -> None:
        """It is not to yield after all."""
        self.num_rows += victim.num_rows_wanted
        self.num_blocks += num_blocks
        params_set = victim.params_set
        if self.num_yielding[params_set] == params_set.num_running:
            self.num_bytes += params_set.num_bytes
        self.num_yielding[params_set] -= 1


class Room:
    """What there is for requests that do not run."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._queue = placement.queue
        self._shares = HeldShares(config, placement)

    def begin_step(self) -> None:
        """Tenants may have left something since they were found to exceed their shares."""
        self._shares.begin_step()

    @property
    def is_divided(self) -> bool:
        """Whether several tenants have shares of it."""
        shares = self._queue.shares
        return shares is not None and shares.is_shared

    def has_yielded(self, request: Request) -> bool:
        """Whether some request of the same tenant was preempted for this step."""
        return request.scheduling.tenant in self._placement.draft.yielded_tenants

    def has_adapter_slot(self, request: Request) -> bool:
        """Whether a step may have the adapter of a request beside those that run."""
        adapter, running = request.scheduling.adapter, self._placement.adapters
        if adapter == "" or adapter in running:
            return True
        return len(running) - ("" in running) < self._config.max_adapters

    def num_bytes_over(self, request: Request) -> int:
        """What parameters of a request and of all that run would take too much together.

        At most 0 for a request that adds nothing to what these are told anyway.
        """
        most, num_more = self._config.max_params_bytes, self.num_more_bytes(request)
        if most is None or num_more == 0:
            return 0
        return self._placement.params_sets.num_running_bytes + num_more - most

    def num_more_bytes(self, request: Request) -> int:
        """What parameters of a request take besides those of all that run."""
        params_set = request.params_set
        if params_set.num_bytes == 0:
            return 0
        found = self._placement.params_sets.find(params_set)
        return 0 if found is not None and found.num_running else params_set.num_bytes

    def can_swap_in(self, request: Request) -> bool:
        """Whether a swapped request may come back: its blocks, rows and slot are there."""
        placement = self._placement
        blocks = placement.blocks
        # Each sequence may need a block at once; else it would be preempted by that.
        needed = blocks.num_swap_in_blocks(request)
        if len(placement.rows):
            needed += len(request.unfinished) + blocks.watermark
        return (
            placement.is_settled(request)
            and self.has_adapter_slot(request)
            and self.num_bytes_over(request) <= 0
            and placement.num_unreserved_rows >= request.num_rows_wanted
            and blocks.device.num_free >= needed
        )

    def exceeds_share(self, request: Request) -> bool:
        """Whether the tenant of a preempted request would have too much if it came back."""
        if self.has_yielded(request) or not self.is_divided:
            return self.has_yielded(request)
        num_blocks = self._num_blocks_to_begin(request)
        return self._shares.exceeds(request, num_blocks) or self.waits_for_its_own(request)

    def takes_over(self, request: Request) -> bool:
        """Returns whether a waiting request would leave too little here to other tenants."""
        blocks, leader = self._placement.blocks, request.unfinished[0]
        num_blocks = blocks.num_lacking(leader, NO_HIT) + blocks.device.num_free
        num_blocks += self._num_more_blocks(request, leader)
        return self._shares.takes_over(request, num_blocks)

    @property
    def is_full(self) -> bool:
        """Whether no row or no block is free."""
        return (
            self._placement.num_unreserved_rows <= 0 or not self._placement.blocks.device.num_free
        )

    @property
    def keeps_last_row(self) -> bool:
        """Whether the only free row is left to tenants that have none here, and none of them waits.

        Only a request that was passed too often may take it.
        """
        if self._placement.num_unreserved_rows != 1 or not self.is_divided:
            return False
        held = self._placement.rows_of_tenants
        return all(tenant in held for tenant in self._queue.tenants)

    def find_row_blocker(self, request: Request) -> AdmissionBlocker | None:
        """Returns ROWS or SHARE if rows alone keep a waiting request out; needs no preparation."""
        if self._placement.num_unreserved_rows < request.num_rows_wanted:
            return AdmissionBlocker.ROWS
        # Whoever was passed often enough goes before everybody's shares.
        is_overdue = request.num_bypasses >= MAX_BYPASSES
        return (
            AdmissionBlocker.SHARE
            if not is_overdue and self._shares.exceeds_rows_of_step(request)
            else None
        )

    def find_blocker(
        self, request: Request, leader: Sequence, hit: PrefixHit
    ) -> AdmissionBlocker | None:
        """Returns what a waiting request lacks besides a slot, if `hit` of its leader exists."""
        placement, blocks = self._placement, self._placement.blocks
        if placement.num_unreserved_rows < request.num_rows_wanted:
            return AdmissionBlocker.ROWS
        if self.num_bytes_over(request) > 0:
            return AdmissionBlocker.BYTES
        num_more = self._num_more_blocks(request, leader)
        allocation = blocks.can_allocate(
            leader, hit, others_run=len(placement.rows) > 0, num_more_blocks=num_more
        )
        if allocation is not Allocation.OK:
            is_never = allocation is Allocation.NEVER
            return AdmissionBlocker.POOL if is_never else AdmissionBlocker.BLOCKS
        # Whoever was passed often enough goes before everybody's shares.
        if request.num_bypasses < MAX_BYPASSES:
            num_taken = blocks.num_lacking(leader, hit) + blocks.device.num_free + num_more
            if self._shares.exceeds(request, num_taken):
                return AdmissionBlocker.SHARE
        return None

    def find_lack(self, request: Request) -> AdmissionBlocker | None:
        """Returns what keeps a waiting or preempted request from a row; None if nothing does."""
        placement = self._placement
        if not placement.is_settled(request):
            return AdmissionBlocker.RESULTS
        if not self.has_adapter_slot(request):
            return AdmissionBlocker.ADAPTER_SLOT
        if request.status is RequestStatus.SWAPPED:
            if self.exceeds_share(request):
                return AdmissionBlocker.SHARE
            return None if self.can_swap_in(request) else AdmissionBlocker.BLOCKS
        if not request.unfinished:
            return None
        leader = request.unfinished[0]
        return self.find_blocker(request, leader, placement.blocks.prefixes.find(leader))

    def waits_for_its_own(self, request: Request) -> bool:
        """Whether other requests of its tenant have the room that a queued request needs.

        No other tenant waits for it then. The others of its tenant do, in this step.
        """
        if not self.is_divided:
            return False
        num_blocks = self._num_blocks_to_begin(request) + self._placement.blocks.watermark
        if request.status is RequestStatus.SWAPPED:
            num_blocks += len(request.unfinished)
        return self._shares.waits_for_its_own(request, num_blocks)

    def _num_blocks_to_begin(self, request: Request) -> int:
        """Free blocks that a request without rows takes when it begins or comes back."""
        blocks = self._placement.blocks
        if request.status is RequestStatus.SWAPPED:
            return blocks.num_swap_in_blocks(request)
        leader = request.unfinished[0]
        num_lacking = blocks.num_lacking(leader, blocks.prefixes.find(leader))
        return num_lacking + blocks.device.num_free + self._num_more_blocks(request, leader)

    def make_way(self, request: Request, leader: Sequence, hit: PrefixHit) -> bool:
        """Preempts less urgent requests for an urgent one; nobody if that is not enough for it.

        Nor anybody without whom it is enough.
        """
        placement, blocks = self._placement, self._placement.blocks
        if placement.draft.has_swapped_in:
            return False  # whoever makes way may be swapped out
        shortage = _Shortage(
            num_rows=request.num_rows_wanted - placement.num_unreserved_rows,
            num_blocks=blocks.num_lacking(leader, hit)
            + self._num_more_blocks(request, leader)
            + blocks.watermark
            - blocks.num_deferred,
            num_bytes=self.num_bytes_over(request),
        )
        victims: list[tuple[Request, int]] = []
        for victim in self._by_least_urgent(request):
            if shortage.is_over:
                break
            if self._queue.may_preempt(request, victim):
                victims.append((victim, self._num_blocks_alone(victim)))
                shortage.yields(*victims[-1])
        if not shortage.is_over:
            return False
        # Who had too little of what lacks is not needed beside those who had more; nor is one of
        # several with the same parameters, where not all of them yield.
        for victim, num_blocks in reversed(victims.copy()):
            shortage.stays(victim, num_blocks)
            if shortage.is_over:
                victims.remove((victim, num_blocks))
            else:
                shortage.yields(victim, num_blocks)
        for victim, _ in victims:
            placement.preempt(victim, PreemptionCause.URGENCY)
        return True

    def _num_blocks_alone(self, request: Request) -> int:
        """Device blocks that nobody but a running request has."""
        blocks = self._placement.blocks
        return sum(blocks.device.reference_count(b) == 1 for b in blocks.blocks_of(request))

    def _by_least_urgent(self, waiting: Request) -> list[Request]:
        """Running requests, least urgent first; none if not even the first of them may yield.

        Not those that this very step places, nor those whose pending blocks others may have found.
        """
        placement, stay_ids = self._placement, self._placement.rows.stay_ids
        order = placement.rows.order
        if len(order) == 0 or not self._queue.may_preempt(
            waiting, placement.rows.sequence(int(order[-1])).request
        ):
            return []
        found: dict[Request, None] = {}
        kept: set[Request] = set()
        for sequence in reversed(placement.rows.running):
            found[sequence.request] = None
            is_pending = int(stay_ids[sequence.row_id]) in placement.draft.published
            if is_pending or sequence.row_id in placement.draft.new_rows:
                kept.add(sequence.request)
        return [request for request in found if request not in kept]

    def _num_more_blocks(self, request: Request, leader: Sequence) -> int:
        """What a request needs besides the blocks of its first sequence."""
        num_cross = self._placement.blocks.num_cross_blocks(request)
        if request.params.num_sequences == 1:
            return num_cross
        num_shared = (leader.num_prompt_tokens - 1) // self._config.block_size
        lengths = [len(s.token_ids) for s in request.unfinished[1:]]
        lengths += [len(leader.token_ids)] * (request.num_rows_wanted - 1 - len(lengths))
        own = [self._config.num_blocks_for(length) for length in lengths]
        if self._config.sliding_window is None:
            return num_cross + sum(own) - num_shared * len(own)
        # What they share may be behind the window of one and not of the other.
        most = self._config.num_window_blocks
        return num_cross + sum(min(num_blocks, most) for num_blocks in own)


# -- What tenants have of rows and blocks, where the queue policy divides these among them ---------

# Whoever is admitted leaves so many times as many blocks as growing rows have to leave, so that it
# is not the next to yield to them.
_ROOM_TO_GROW = 2


class HeldShares:
    """Compares what tenants have with what they may have; see `queue/tenant_shares.py`.

    Where the policy has no shares, nobody exceeds any, and who came last yields first.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._rows = placement.rows
        self._blocks = placement.blocks
        self._shares = placement.queue.shares
        # Tenants that have been found to exceed theirs in this step.
        self._exceeding: set[str] = set()

    def begin_step(self) -> None:
        """Whoever exceeds its share from now on does for the rest of the step."""
        self._exceeding.clear()

    def exceeds(self, request: Request, num_blocks: int) -> bool:
        """Whether rows and `num_blocks` free blocks for `request` leave too few to other tenants.

        The others of its tenant do not pass it then, in this step.
        """
        shares, tenant = self._shares, request.scheduling.tenant
        if shares is None or tenant in self._exceeding:
            return shares is not None
        num_blocks_left = (self._blocks.device.num_free - num_blocks) // _ROOM_TO_GROW
        if not self._exceeds_rows(request) and self._may_take_blocks(tenant, num_blocks_left):
            return False
        self._exceeding.add(tenant)
        return True

    def exceeds_rows_of_step(self, request: Request) -> bool:
        """Returns whether a tenant exceeds its share of rows; holds for the rest of the step."""
        if self._shares is None:
            return False
        tenant = request.scheduling.tenant
        if tenant not in self._exceeding and self._exceeds_rows(request):
            self._exceeding.add(tenant)
        return tenant in self._exceeding

    def _exceeds_rows(self, request: Request) -> bool:
        """Returns whether rows for `request` leave too few to other tenants."""
        shares, tenant = self._shares, request.scheduling.tenant
        num_rows = len(self._placement.rows_of_tenants.get(tenant, ()))
        num_rows_left = self._placement.num_unreserved_rows - request.num_rows_wanted
        return shares is not None and not shares.may_take(tenant, num_rows, num_rows_left)

    def takes_over(self, request: Request, num_blocks: int) -> bool:
        """Returns whether rows or blocks of `request` alone leave too few to other tenants.

        A tenant that has nothing here may take them: `exceeds` counts what it has before.
        """
        shares, tenant = self._shares, request.scheduling.tenant
        if shares is None:
            return False
        num_rows = request.num_rows_wanted
        num_rows_left = self._placement.num_unreserved_rows - num_rows
        num_blocks_left = self._blocks.device.num_free - num_blocks
        takes_rows = num_rows > 1 and not shares.leaves_enough(tenant, num_rows, num_rows_left)
        return takes_rows or not shares.leaves_enough(tenant, num_blocks, num_blocks_left)

    def waits_for_its_own(self, request: Request, num_blocks: int) -> bool:
        """Returns whether the tenant of `request` holds the rows or the `num_blocks` that it needs.

        These do not pass it then, in this step.
        """
        tenant = request.scheduling.tenant
        num_rows = len(self._placement.rows_of_tenants.get(tenant, ()))
        if num_rows == 0:
            return False
        num_rows_left = self._config.max_num_seqs - num_rows
        num_blocks_left = self._blocks.device.num_blocks - self._num_blocks_of(tenant)
        if num_rows_left >= request.num_rows_wanted and num_blocks_left >= num_blocks:
            return False
        self._exceeding.add(tenant)
        return True

    # -- who yields ----------------------------------------------------------------------------

    def first_to_yield_share(self, num_blocks: int) -> Request | None:
        """Who is to be preempted so that `num_blocks` for rows that grow leave some to others.

        None if enough is left, counting what comes when steps in flight are answered, or if the
        tenant that has most has one request only.
        """
        if self._shares is None or not self._shares.is_shared:
            return None
        num_left = self._blocks.device.num_free + self._blocks.num_deferred - num_blocks
        if num_left * HELD_PER_LEFT >= self._blocks.device.num_blocks:
            return None  # seldom is there less
        victim = self.first_to_yield()
        tenant = victim.scheduling.tenant
        if self._may_take_blocks(tenant, num_left):
            return None
        row_ids = self._placement.rows_of_tenants[tenant]
        has_others = any(self._rows.sequence(row_id).request is not victim for row_id in row_ids)
        return victim if has_others else None

    def first_to_yield(self) -> Request:
        """The running request that is preempted first where blocks lack.

        It is the last of the tenant that has most running requests before it, by its weight: no
        tenant makes room for another that has more. The oldest of all yields last.
        """
        shares = self._shares
        if shares is None:
            return self._rows.least_urgent.request
        num_before = Counter[str]()
        places: dict[Request, tuple[int, tuple[int, ...]]] = {}
        for request in dict.fromkeys(sequence.request for sequence in self._rows.running):
            tenant = request.scheduling.tenant
            places[request] = (num_before[tenant] * shares.price(tenant), request.rank)
            num_before[tenant] += 1
        return max(places, key=places.__getitem__)

    def _may_take_blocks(self, tenant: str, num_left: int) -> bool:
        assert self._shares is not None
        num_left = max(num_left, 0)
        # Seldom is so little left that it has to be looked up.
        return self._shares.may_take(
            tenant, self._blocks.device.num_blocks, num_left
        ) or self._shares.may_take(tenant, self._num_blocks_of(tenant), num_left)

    def _num_blocks_of(self, tenant: str) -> int:
        """Blocks in tables of a tenant; shared ones as often as they are there."""
        row_ids = list(self._placement.rows_of_tenants.get(tenant, ()))
        return int(self._rows.num_slots[row_ids].sum()) // self._config.block_size
