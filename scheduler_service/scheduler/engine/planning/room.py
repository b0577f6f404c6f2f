"""Room for requests without rows: rows, blocks, parameter bytes, adapter slots, tenants' shares.

Also chooses victims: running requests to preempt for an urgent one, or for rows that grow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_service.scheduler.engine.blocks import NO_HIT, Allocation, PrefixHit
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.queue import HELD_PER_LEFT
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    ParamsSet,
    PreemptionCause,
    Request,
    RequestStatus,
    SchedulerConfig,
    Sequence,
)

MAX_BYPASSES = 64


@dataclass(slots=True)
class _Shortage:
    """Rows, blocks and bytes still to be freed for a request; negative where more is free.

    `num_yielding`: number of victims with each set of parameters.
    """

    num_rows: int
    num_blocks: int
    num_bytes: int
    num_yielding: Counter[ParamsSet] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        """Whether enough rows, blocks and bytes are freed."""
        return max(self.num_rows, self.num_blocks, self.num_bytes) <= 0

    def yields(self, victim: Request, num_blocks: int) -> None:
        """Counts a running request as a victim, with `num_blocks` that no other request has."""
        self.num_rows -= victim.num_rows_wanted
        self.num_blocks -= num_blocks
        params_set = victim.params_set
        self.num_yielding[params_set] += 1
        if self.num_yielding[params_set] == params_set.num_running:
            self.num_bytes -= params_set.num_bytes

    def stays(self, victim: Request, num_blocks: int) -> None:
        """Takes a victim out again; undoes `yields`."""
        self.num_rows += victim.num_rows_wanted
        self.num_blocks += num_blocks
        params_set = victim.params_set
        if self.num_yielding[params_set] == params_set.num_running:
            self.num_bytes += params_set.num_bytes
        self.num_yielding[params_set] -= 1


class Room:
    """Rows, blocks, bytes and adapter slots available to requests that do not run."""

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._queue = placement.queue
        self._shares = HeldShares(config, placement)

    def begin_step(self) -> None:
        """Forgets which tenants exceeded their shares: they may have freed something since."""
        self._shares.begin_step()

    @property
    def is_divided(self) -> bool:
        """Whether several active tenants share the room."""
        shares = self._queue.shares
        return shares is not None and shares.is_shared

    def has_yielded(self, request: Request) -> bool:
        """Returns whether a request of the same tenant was preempted for this step."""
        return request.scheduling.tenant in self._placement.draft.yielded_tenants

    def find_adapter_blocker(self, request: Request) -> AdmissionBlocker | None:
        """Returns what keeps a row from a request's adapter: a slot, its load, or a failed load."""
        adapter, running = request.scheduling.adapter, self._placement.adapters
        if adapter == "" or adapter in running:
            return None
        slots = self._placement.adapter_slots
        if slots.is_loading(adapter):
            return AdmissionBlocker.ADAPTER_LOAD
        if slots.failure(adapter, request.submitted_ns) is not None:
            return AdmissionBlocker.ADAPTER_FAILED
        if len(running) - ("" in running) >= self._config.max_adapters:
            return AdmissionBlocker.ADAPTER_SLOT
        if not slots.loads_adapters or adapter in slots.loaded:
            return None
        if slots.can_load(self._placement.kept_adapters, self._placement.last_answered_step_id):
            return AdmissionBlocker.ADAPTER_LOAD
        return AdmissionBlocker.ADAPTER_SLOT

    def num_bytes_over(self, request: Request) -> int:
        """Returns by how many bytes parameters of `request` and running requests exceed the limit.

        At most 0 if `request` fits, or has the parameters of a running request.
        """
        most, num_more = self._config.max_params_bytes, self.num_more_bytes(request)
        if most is None or num_more == 0:
            return 0
        return self._placement.params_sets.num_running_bytes + num_more - most

    def num_more_bytes(self, request: Request) -> int:
        """Returns the bytes that a request's parameters add to those of running requests."""
        params_set = request.params_set
        if params_set.num_bytes == 0:
            return 0
        found = self._placement.params_sets.find(params_set)
        return 0 if found is not None and found.num_running else params_set.num_bytes

    def can_swap_in(self, request: Request) -> bool:
        """Returns whether blocks, rows, bytes and a slot are free for a swapped request."""
        placement = self._placement
        blocks = placement.blocks
        # Each sequence may need a block at once: without it, the request would be preempted again.
        needed = blocks.num_swap_in_blocks(request)
        if len(placement.rows):
            needed += len(request.unfinished) + blocks.watermark
        return (
            placement.is_settled(request)
            and self.find_adapter_blocker(request) is None
            and self.num_bytes_over(request) <= 0
            and placement.num_unreserved_rows >= request.num_rows_wanted
            and blocks.device.num_free >= needed
        )

    def exceeds_share(self, request: Request) -> bool:
        """Returns whether the tenant of a preempted request would have too much if it returned."""
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
        """True if the only free row is reserved for absent tenants: every waiting tenant has a row.

        Only a request that was passed MAX_BYPASSES times may take the row.
        """
        if self._placement.num_unreserved_rows != 1 or not self.is_divided:
            return False
        held = self._placement.rows_of_tenants
        return all(tenant in held for tenant in self._queue.tenants)

    def find_row_blocker(self, request: Request) -> AdmissionBlocker | None:
        """Returns ROWS or SHARE if rows alone keep a waiting request out; needs no preparation."""
        if self._placement.num_unreserved_rows < request.num_rows_wanted:
            return AdmissionBlocker.ROWS
        # A request that was passed often enough is not held to its tenant's share.
        is_overdue = request.num_bypasses >= MAX_BYPASSES
        return (
            AdmissionBlocker.SHARE
            if not is_overdue and self._shares.exceeds_rows_of_step(request)
            else None
        )

    def find_blocker(
        self, request: Request, leader: Sequence, hit: PrefixHit
    ) -> AdmissionBlocker | None:
        """Returns what a waiting request lacks, adapter slot aside; None if nothing.

        `hit`: the prefix of its first sequence `leader` that the caches hold.
        """
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
        # A request that was passed often enough is not held to its tenant's share.
        if request.num_bypasses < MAX_BYPASSES and self._queue.shares is not None:
            num_taken = blocks.num_lacking(leader, hit) + blocks.device.num_free + num_more
            if self._shares.exceeds(request, num_taken):
                return AdmissionBlocker.SHARE
        return None

    def find_wait_reason(self, request: Request) -> AdmissionBlocker | None:
        """Returns what keeps a waiting or preempted request from a row; None if nothing does."""
        placement = self._placement
        first = next(filter(self._may_return, placement.preempted), None)
        if first not in (None, request) and not self._queue.may_go_before(request, first):
            return AdmissionBlocker.OTHERS_FIRST
        if not placement.is_settled(request):
            return AdmissionBlocker.RESULTS
        blocker = self.find_adapter_blocker(request)
        if blocker is not None:
            return blocker
        if request.status is RequestStatus.SWAPPED:
            if self.exceeds_share(request):
                return AdmissionBlocker.SHARE
            return None if self.can_swap_in(request) else AdmissionBlocker.BLOCKS
        if not request.unfinished:
            return None
        leader = request.unfinished[0]
        return self.find_blocker(request, leader, placement.blocks.prefixes.find(leader))

    def _may_return(self, preempted: Request) -> bool:
        """Returns whether a preempted request does not wait for others of its tenant to leave."""
        return not (self.is_divided and self.exceeds_share(preempted))

    def waits_for_its_own(self, request: Request) -> bool:
        """Returns whether the room that a queued request needs is held by others of its tenant.

        Requests of other tenants do not wait for such a request; those of its own tenant do, in
        this step.
        """
        if not self.is_divided:
            return False
        num_blocks = self._num_blocks_to_begin(request) + self._placement.blocks.watermark
        if request.status is RequestStatus.SWAPPED:
            num_blocks += len(request.unfinished)
        return self._shares.waits_for_its_own(request, num_blocks)

    def _num_blocks_to_begin(self, request: Request) -> int:
        """Returns the free blocks that a request without rows takes when it begins or returns."""
        blocks = self._placement.blocks
        if request.status is RequestStatus.SWAPPED:
            return blocks.num_swap_in_blocks(request)
        leader = request.unfinished[0]
        num_lacking = blocks.num_lacking(leader, blocks.prefixes.find(leader))
        return num_lacking + blocks.device.num_free + self._num_more_blocks(request, leader)

    def make_way(self, request: Request, leader: Sequence, hit: PrefixHit) -> bool:
        """Preempts less urgent requests until an urgent request fits; returns whether it will fit.

        Preempts no request if preempting all of them is not enough, and no request that is not
        needed.
        """
        placement, blocks = self._placement, self._placement.blocks
        if placement.draft.has_swapped_in:
            return False  # victims may be swapped out, and a step does not swap both ways
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
        # Spares victims that later ones made unnecessary, such as one of several requests with the
        # same parameters where not all of them are victims.
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
        """Returns the number of device blocks that only this running request has."""
        blocks = self._placement.blocks
        return sum(blocks.device.reference_count(b) == 1 for b in blocks.blocks_of(request))

    def _by_least_urgent(self, waiting: Request) -> list[Request]:
        """Returns running requests, least urgent first; none if none of them may be preempted.

        Leaves out requests that this very step places, and requests whose pending blocks other
        requests may have found in the prefix cache.
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
        """Returns the blocks that a request needs besides those of its first sequence."""
        num_cross = self._placement.blocks.num_cross_blocks(request)
        if request.params.num_sequences == 1:
            return num_cross
        num_shared = (leader.num_prompt_tokens - 1) // self._config.block_size
        lengths = [len(s.token_ids) for s in request.unfinished[1:]]
        lengths += [len(leader.token_ids)] * (request.num_rows_wanted - 1 - len(lengths))
        own = [self._config.num_blocks_for(length) for length in lengths]
        if self._config.sliding_window is None:
            return num_cross + sum(own) - num_shared * len(own)
        # Shared blocks may lie behind the window of one sequence and within that of another.
        most = self._config.num_window_blocks
        return num_cross + sum(min(num_blocks, most) for num_blocks in own)


# -- Shares of tenants -----------------------------------------------------------------------------

# An admission must leave this many times the blocks that growing rows must leave, so that the
# admitted request is not the next victim of growing rows.
_ROOM_TO_GROW = 2


class HeldShares:
    """Compares the rows and blocks that tenants hold with their shares; see `TenantShares`.

    Where the queue policy has no shares, no tenant exceeds its share, and the least urgent request
    is the first victim.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._rows = placement.rows
        self._blocks = placement.blocks
        self._shares = placement.queue.shares
        # Tenants that were found to exceed their shares in this step.
        self._exceeding: set[str] = set()

    def begin_step(self) -> None:
        """Forgets which tenants exceeded their shares.

        A tenant found to exceed its share from now on does so for the rest of the step.
        """
        self._exceeding.clear()

    def exceeds(self, request: Request, num_blocks: int) -> bool:
        """Returns whether admitting `request` with `num_blocks` leaves other tenants too little.

        Counts the rows it wants and the free blocks it takes. If the result is True, other requests
        of the tenant do not pass `request` in this step.
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

        In `exceeds`, by contrast, a tenant that holds nothing here may take them: only what the
        tenant held before counts there.
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

        If so, other requests of the tenant do not pass `request` in this step.
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

    # -- victims -------------------------------------------------------------------------------

    def first_to_yield_share(self, num_blocks: int) -> Request | None:
        """Returns a victim if `num_blocks` for growing rows leave too few blocks to other tenants.

        Returns None if enough blocks are left, counting deferred blocks of steps in flight, or if
        the tenant that holds most has only one running request.
        """
        if self._shares is None or not self._shares.is_shared:
            return None
        num_left = self._blocks.device.num_free + self._blocks.num_deferred - num_blocks
        if num_left * HELD_PER_LEFT >= self._blocks.device.num_blocks:
            return None  # the usual case
        victim = self.first_to_yield()
        tenant = victim.scheduling.tenant
        if self._may_take_blocks(tenant, num_left):
            return None
        row_ids = self._placement.rows_of_tenants[tenant]
        has_others = any(self._rows.sequence(row_id).request is not victim for row_id in row_ids)
        return victim if has_others else None

    def first_to_yield(self) -> Request:
        """Returns the running request that is preempted first where blocks lack.

        That is the last request of the tenant with the most running requests before it, by the
        tenant's weight: no tenant makes room for a tenant that has more. The oldest request of all
        is preempted last.
        """
        shares = self._shares
        if shares is None:
            return self._rows.least_urgent.request
        num_before = Counter[str]()
        order_keys: dict[Request, tuple[int, tuple[int, ...]]] = {}
        for request in dict.fromkeys(sequence.request for sequence in self._rows.running):
            tenant = request.scheduling.tenant
            order_keys[request] = (num_before[tenant] * shares.price(tenant), request.rank)
            num_before[tenant] += 1
        return max(order_keys, key=order_keys.__getitem__)

    def _may_take_blocks(self, tenant: str, num_left: int) -> bool:
        assert self._shares is not None
        num_left = max(num_left, 0)
        # The first test, with the whole pool as held, mostly passes and saves counting the blocks.
        return self._shares.may_take(
            tenant, self._blocks.device.num_blocks, num_left
        ) or self._shares.may_take(tenant, self._num_blocks_of(tenant), num_left)

    def _num_blocks_of(self, tenant: str) -> int:
        """Returns the blocks in a tenant's block tables; a shared block counts once per table."""
        row_ids = list(self._placement.rows_of_tenants.get(tenant, ()))
        return int(self._rows.num_slots[row_ids].sum()) // self._config.block_size
