"""What tenants may take of what there are only so many of: places in the queue, rows, blocks.

Nobody knows beforehand how many tenants come, so nobody is given a fixed part. A tenant may take
more as long as what it has is at most HELD_PER_LEFT times what it leaves to others. So one that
takes all it can leaves a seventeenth, which is enough for whoever comes now and then; of several
that do, each has as much as the others, by their weights, and less is left. A tenant that has
nothing may take anything, so nobody waits for ever.

Source of the rule: Choudhury and Hahne 1998, "Dynamic Queue Length Thresholds for Shared-Memory
Packet Switches".
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

HELD_PER_LEFT = 16
# Weights are integers, so that no rounding depends on the order of additions: something that a
# tenant of weight 1 has, or was given, counts as much as this.
UNIT = 2**64


class TenantShares:
    """The weights of tenants. `is_shared`: whether more than one is known; else all is its own."""

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self._prices: dict[str, int] = {}
        self.weigh(tenant_weights)
        self.is_shared = False

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
