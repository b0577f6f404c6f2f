"""What tenants may take of what there are only so many of: places in the queue, rows, blocks.

Nobody knows beforehand how many tenants come, so nobody is given a fixed part. A tenant may take
more as long as what it has is at most HELD_PER_LEFT times what it leaves to others. So one that
takes all it can leaves a seventeenth, which is enough for whoever comes now and then; of several
that do, each has as much as the others, by their weights, and less is left. A tenant that has
nothing may take anything, so nobody waits for ever. Only tenants that are active count: a tenant
that is alone takes everything.

Source of the rule: Choudhury and Hahne 1998, "Dynamic Queue Length Thresholds for Shared-Memory
Packet Switches".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from itertools import islice

HELD_PER_LEFT = 16
# Weights are integers, so that no rounding depends on the order of additions: something that a
# tenant of weight 1 has, or was given, counts as much as this.
UNIT = 2**64
# A tenant stays active for this long after its last request ended.
ACTIVE_NS = 30_000_000_000
# Remembered tenants without a request. One is enough to know that there is another tenant.
_MAX_IDLE = 16


class TenantShares:
    """The weights of tenants, and which tenants are active.

    A tenant is active while it has an unfinished request, and for ACTIVE_NS after the last one.
    `now_ns`: the current time; whoever owns the clock sets it.
    """

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self._prices: dict[str, int] = {}
        self.weigh(tenant_weights)
        self.now_ns = 0
        self._unfinished: dict[str, set[str]] = {}
        # When the last request of a tenant ended, of active tenants without a request.
        self._idle_since_ns: OrderedDict[str, int] = OrderedDict()

    @property
    def is_shared(self) -> bool:
        """Whether several tenants are active."""
        if len(self._unfinished) > 1:
            return True
        # Those that became idle last come last.
        lately = islice(reversed(self._idle_since_ns.values()), 2)
        num_idle = sum(self.now_ns - since_ns <= ACTIVE_NS for since_ns in lately)
        return len(self._unfinished) + num_idle > 1

    def begins(self, tenant: str, request_id: str) -> None:
        """Counts a request as unfinished; counting it twice changes nothing."""
        self._unfinished.setdefault(tenant, set()).add(request_id)
        self._idle_since_ns.pop(tenant, None)

    def ends(self, tenant: str, request_id: str) -> None:
        """Removes an unfinished request, if it is one."""
        unfinished = self._unfinished.get(tenant)
        if unfinished is None or request_id not in unfinished:
            return
        unfinished.remove(request_id)
        if not unfinished:
            del self._unfinished[tenant]
            self._idle_since_ns[tenant] = self.now_ns
            if len(self._idle_since_ns) > _MAX_IDLE:
                self._idle_since_ns.popitem(last=False)

    def weigh(self, tenant_weights: Mapping[str, float]) -> None:
        """Gives tenants these weights, and all others 1."""
        self._prices = {
            tenant: max(1, round(UNIT / Fraction(weight)))
            for tenant, weight in tenant_weights.items()
        }

    def price(self, tenant: str) -> int:
        """What one of anything counts for `tenant`; less for one of more weight."""
        return self._prices.get(tenant, UNIT)

    def may_take(self, tenant: str, num_held: int, num_left: int) -> bool:
        """Whether `tenant`, which has `num_held`, may take what leaves `num_left` to others."""
        return not self.is_shared or self.leaves_enough(tenant, num_held, num_left)

    def leaves_enough(self, tenant: str, num_held: int, num_left: int) -> bool:
        """The same where somebody who is not known yet may come and is to find something."""
        return num_held == 0 or num_held * self.price(tenant) <= HELD_PER_LEFT * num_left * UNIT
