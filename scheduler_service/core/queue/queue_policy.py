"""In which order requests begin: what a queue policy is, and which there are.

A policy answers questions about requests. It holds none of them, and knows nothing of blocks, rows
or steps: the mechanics are in `waiting_queue.py`, once for all policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from scheduler_service.core.queue.ordered_queue import Key
from scheduler_service.core.queue.tenant_shares import TenantShares
from scheduler_service.core.request import Request


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
