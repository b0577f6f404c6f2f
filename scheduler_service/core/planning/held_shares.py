"""What tenants have of rows and blocks, where the queue policy divides these among them."""

from __future__ import annotations

from collections import Counter

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement import Placement
from scheduler_service.core.queue.tenant_shares import HELD_PER_LEFT
from scheduler_service.core.request import Request

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
