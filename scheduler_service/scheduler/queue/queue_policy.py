"""Queue policies, which order requests, and the shares of tenants in limited resources.

A policy answers questions about requests. It holds no requests, and knows nothing of blocks, rows
or steps: the mechanics are in `waiting_queue.py`, shared by all policies.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import islice
from types import MappingProxyType

from scheduler_service.scheduler.queue.ordered_queue import Key
from scheduler_service.scheduler.values import Request


class QueuePolicy:
    """Rules of a queue policy, with defaults.

    Requests are ordered by step class, then by key, then by arrival. Step class and key are tuples
    of the same length for all requests, and do not change while a request is unfinished. One queue
    serves all engines, so a policy orders the requests of all engines.

    `shares`: limits on the rows and blocks of tenants. With shares, the tenant that got the least
    service is next, and the policy's order holds among the requests of one tenant. None: tenants
    are not told apart. The counters are no part of the order, as they change with every token.

    `allows_bypasses`: whether a request may begin before an older one. If not, the order is that of
    arrival, and no request passes one that lacks blocks or rows. If so, and without shares, the
    request that has waited longest has a turn now and then, which prevents starvation.

    `refuses_late`: whether a waiting request ends when it can no longer meet its deadline. Step
    class and key of a request with a deadline then end with the deadline.

    `keeps_targets`: whether steps with prompts keep the times between tokens that requests want.
    """

    shares: TenantShares | None = None
    allows_bypasses: bool = True
    refuses_late: bool = False
    keeps_targets: bool = False

    def key(self, request: Request) -> Key:
        """Returns the place of a request within its step class, smallest first."""
        return ()

    def step_class(self, request: Request) -> Key:
        """Returns the class of a request; smaller classes take the tokens of a step first.

        Within a class, decodes go before prompts, so no decode is left out of a step.
        """
        return ()

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Returns whether `running` may be preempted so that `waiting` can begin.

        Never true in both directions.
        """
        return False


class FirstComeFirstServed(QueuePolicy):
    """Order of arrival."""

    allows_bypasses = False


class Priority(QueuePolicy):
    """Order of priority, smallest first; a smaller priority preempts larger ones."""

    keeps_targets = True

    def step_class(self, request: Request) -> Key:
        return (request.scheduling.priority,)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.scheduling.priority < running.scheduling.priority


class EarliestDeadline(Priority):
    """Order of priority, then of deadline, earliest first; no deadline comes last."""

    refuses_late = True

    def step_class(self, request: Request) -> Key:
        deadline_ns = request.scheduling.deadline_ns
        return (request.scheduling.priority, deadline_ns is None, deadline_ns or 0)


class FairShare(QueuePolicy):
    """Order of service per weight, least-served tenant first."""

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self.shares = TenantShares(tenant_weights)


# Factories of policies from tenant weights, by the name that the operator gives.
QUEUE_POLICIES: Mapping[str, Callable[[Mapping[str, float]], QueuePolicy]]
QUEUE_POLICIES = MappingProxyType(
    {
        "fcfs": lambda _: FirstComeFirstServed(),
        "priority": lambda _: Priority(),
        "fair": FairShare,
        "deadline": lambda _: EarliestDeadline(),
    }
)


def make_queue_policy(name: str, tenant_weights: Mapping[str, float]) -> QueuePolicy:
    """Returns the policy called `name`. A tenant without a weight has weight 1.

    Raises ValueError that names the field, its value and the allowed range.
    """
    for tenant, weight in tenant_weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"tenant_weights[{tenant!r}] is {weight}; allowed: above 0, finite")
    if name not in QUEUE_POLICIES:
        raise ValueError(f"queue_policy is {name!r}; allowed: {', '.join(QUEUE_POLICIES)}")
    return QUEUE_POLICIES[name](tenant_weights)


def rank_of(policy: QueuePolicy, request: Request) -> Key:
    """Returns the place of a request among all requests: protected ones first, by arrival."""
    if request.is_protected:
        return (0, request.arrival)
    return (1, *policy.step_class(request), *policy.key(request), request.arrival)


# -- Tenant shares of limited resources: places in the queue, rows, blocks -------------------------
#
# The number of tenants is not known in advance, so no tenant gets a fixed part. A tenant may take
# more as long as it holds at most HELD_PER_LEFT times what it leaves to other tenants. So a tenant
# that takes all it can leaves a seventeenth, which is enough for occasional tenants; several such
# tenants get equal amounts, by their weights, and leave less. A tenant that holds nothing may take
# anything, so no tenant waits for ever. Only active tenants count: a tenant that is alone may take
# everything.
#
# Source of the rule: Choudhury and Hahne 1998, "Dynamic Queue Length Thresholds for Shared-Memory
# Packet Switches".

HELD_PER_LEFT = 16
# Price of one unit for a tenant of weight 1. Prices are integers, so that no rounding depends on
# the order of additions.
UNIT = 2**64
# A tenant stays active for this long after its last request ended.
ACTIVE_NS = 30_000_000_000
# Most remembered tenants without a request. One is enough to know that another tenant is active.
_MAX_IDLE = 16


class TenantShares:
    """Weights of tenants, and the set of active tenants.

    A tenant is active while it has an unfinished request, and for ACTIVE_NS after the last one.
    `now_ns`: current time, set by the owner.
    """

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self._prices: dict[str, int] = {}
        self.weigh(tenant_weights)
        self.now_ns = 0
        self._unfinished: dict[str, set[str]] = {}
        # End of the last request in ns, of active tenants without a request.
        self._idle_since_ns: OrderedDict[str, int] = OrderedDict()

    @property
    def is_shared(self) -> bool:
        """Whether several tenants are active."""
        if len(self._unfinished) > 1:
            return True
        # The tenants that became idle last are at the end.
        lately = islice(reversed(self._idle_since_ns.values()), 2)
        num_idle = sum(self.now_ns - since_ns <= ACTIVE_NS for since_ns in lately)
        return len(self._unfinished) + num_idle > 1

    def begins(self, tenant: str, request_id: str) -> None:
        """Counts a request as unfinished; counting it twice changes nothing."""
        self._unfinished.setdefault(tenant, set()).add(request_id)
        self._idle_since_ns.pop(tenant, None)

    def ends(self, tenant: str, request_id: str) -> None:
        """Counts a request as ended; ignores unknown requests."""
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
        """Sets the weights of tenants; all other tenants get weight 1."""
        self._prices = {
            tenant: max(1, round(UNIT / Fraction(weight)))
            for tenant, weight in tenant_weights.items()
        }

    def price(self, tenant: str) -> int:
        """Returns the price of one unit for `tenant`; a larger weight lowers the price."""
        return self._prices.get(tenant, UNIT)

    def may_take(self, tenant: str, num_held: int, num_left: int) -> bool:
        """Returns whether `tenant`, which holds `num_held`, may take more and leave `num_left`."""
        return not self.is_shared or self.leaves_enough(tenant, num_held, num_left)

    def leaves_enough(self, tenant: str, num_held: int, num_left: int) -> bool:
        """Returns the same as `may_take`, as if further tenants, yet unknown, were active."""
        return num_held == 0 or num_held * self.price(tenant) <= HELD_PER_LEFT * num_left * UNIT
