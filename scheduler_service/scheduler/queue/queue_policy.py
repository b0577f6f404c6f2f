"""In which order requests begin: what a queue policy is, and which there are.

A policy answers questions about requests. It holds none of them, and knows nothing of blocks, rows
or steps: the mechanics are in `waiting_queue.py`, once for all policies.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import islice
from types import MappingProxyType

from scheduler_service.scheduler.queue.ordered_queue import Key
from scheduler_service.scheduler.values.request import Request


class QueuePolicy:
    """The rules of a policy, each with what holds unless a policy says otherwise.

    Requests are ordered by step class, then by key, then by arrival. Both are tuples of the same
    length for all requests, and do not change while a request is unfinished. One queue serves all
    engines, so a policy orders the requests of all of them.

    `shares`: what tenants may take of rows and blocks. With shares, the tenant that was served
    least is next, and the order holds among the requests of one tenant. None: tenants are not told
    apart. The counters are no part of the order, as they change with every token.
    `allows_bypasses`: whether a request may begin before an older one. If not, the order is that of
    arrival, and nobody passes a request that lacks blocks or rows. If so, and without shares, the
    request that has waited longest has a turn now and then, so that none starves.
    `refuses_late`: whether a waiting request ends when it cannot meet its deadline any more. Step
    class and key of a request with a deadline then end with it.
    """

    shares: TenantShares | None = None
    allows_bypasses: bool = True
    refuses_late: bool = False

    def key(self, request: Request) -> Key:
        """Returns the place of a request within its step class, smallest first."""
        return ()

    def step_class(self, request: Request) -> Key:
        """Returns the class of a request; smaller ones take the tokens of a step from others.

        Within a class, decodes go before prompts, so none of them is left out of a step.
        """
        return ()

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Returns whether `running` may be preempted so that `waiting` can begin.

        Never true both ways.
        """
        return False


class FirstComeFirstServed(QueuePolicy):
    """The order of arrival."""

    allows_bypasses = False


class Priority(QueuePolicy):
    """The smallest priority first; it preempts larger ones."""

    def step_class(self, request: Request) -> Key:
        return (request.scheduling.priority,)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.scheduling.priority < running.scheduling.priority


class EarliestDeadline(Priority):
    """Of the same priority, the earliest deadline first; requests without one come last."""

    refuses_late = True

    def step_class(self, request: Request) -> Key:
        deadline_ns = request.scheduling.deadline_ns
        return (request.scheduling.priority, deadline_ns is None, deadline_ns or 0)


class FairShare(QueuePolicy):
    """The tenant that was served least first, by weight."""

    def __init__(self, tenant_weights: Mapping[str, float]) -> None:
        self.shares = TenantShares(tenant_weights)


# By the name that the operator gives; made from the weights of tenants.
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
    """Returns the policy called `name`. A tenant without a weight has 1.

    Raises ValueError that names the field, its value and what is allowed.
    """
    for tenant, weight in tenant_weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"tenant_weights[{tenant!r}] is {weight}; allowed: above 0, finite")
    if name not in QUEUE_POLICIES:
        raise ValueError(f"queue_policy is {name!r}; allowed: {', '.join(QUEUE_POLICIES)}")
    return QUEUE_POLICIES[name](tenant_weights)


def rank_of(policy: QueuePolicy, request: Request) -> Key:
    """Returns the place of a request in the order of all: protected ones first, by arrival."""
    if request.is_protected:
        return (0, request.arrival)
    return (1, *policy.step_class(request), *policy.key(request), request.arrival)


# --------------------------------------------------------------------------------------------------
# What tenants may take of what there are only so many of: places in the queue, rows, blocks.
#
# Nobody knows beforehand how many tenants come, so nobody is given a fixed part. A tenant may take
# more as long as what it has is at most HELD_PER_LEFT times what it leaves to others. So one that
# takes all it can leaves a seventeenth, which is enough for whoever comes now and then; of several
# that do, each has as much as the others, by their weights, and less is left. A tenant that has
# nothing may take anything, so nobody waits for ever. Only tenants that are active count: a tenant
# that is alone takes everything.
#
# Source of the rule: Choudhury and Hahne 1998, "Dynamic Queue Length Thresholds for Shared-Memory
# Packet Switches".

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
