"""Who is next: the waiting requests and the order of all requests.

A policy orders and picks; it knows nothing of blocks, rows or steps. One core has one policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Protocol, assert_never

from scheduler_service.core.policies.fair_share import FairSharePolicy
from scheduler_service.core.policies.request_queue import (
    BEFORE_ALL,
    Key,
    Lanes,
    OrderedQueue,
    all_lanes,
)
from scheduler_service.core.policies.urgency import TURN_EVERY, UrgencyPolicy
from scheduler_service.core.request import Request

__all__ = ["TURN_EVERY", "QueuePolicy", "QueuePolicyName", "UrgencyPolicy", "make_queue_policy"]


class QueuePolicyName(Enum):
    """What decides who is next.

    FCFS: the arrival. PRIORITY: the request's priority. FAIR: what its tenant was served so far.
    DEADLINE: the priority, then the deadline.
    """

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"
    DEADLINE = "deadline"


class QueuePolicy(Protocol):
    """The waiting requests, and an order of all requests of a core. Arrivals are unique.

    `charges_outputs`: whether `sampled` matters; where it does not, nobody needs to call it.
    """

    charges_outputs: bool

    def __len__(self) -> int:
        """Requests waiting."""

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in a stable order of no meaning."""

    def push(self, request: Request) -> None:
        """Adds `request`, which is new, or was running and comes back with its old arrival."""

    def remove(self, request: Request) -> None:
        """Removes `request`, which must be here: it was admitted, or it has ended."""

    def candidates(
        self, now_ns: int = 0, open_lanes: Callable[[], Lanes] = all_lanes
    ) -> Iterator[Request]:
        """Waiting requests in the order in which they should be admitted now, each at most once.

        Lazy: between two of them the caller may admit and remove the last one and push others,
        and the order then reflects it. What is pushed meanwhile may be left to the next iterator.
        Of other lanes than `open_lanes`, asked anew for each, there is none; a lane is an adapter.
        What `overdue` returns may be left out, however much of it there is.
        """

    def overdue(self, now_ns: int) -> Request | None:
        """One of the requests that cannot meet their deadline any more, because it is past."""

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Takes note that `request`, which waits here, runs now; the caller then removes it.

        `num_uncached_tokens`: those of its tokens that have to be computed. May set
        `request.is_protected`.
        """

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Takes note of `num_tokens` output tokens of requests of `tenant`."""

    def rank(self, request: Request) -> Key:
        """Smaller is more urgent, unique; changes only when the request is admitted."""

    def urgency(self, request: Request) -> Key:
        """Smaller goes first to the tokens of a step; among equals decodes go before prompts.

        Never decreases along the ranks.
        """

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether `running` may be preempted to admit `waiting`. Never true both ways."""


class FcfsPolicy:
    """First come, first served. Nobody is preempted for somebody who waits."""

    charges_outputs = False

    def __init__(self) -> None:
        self._waiting: OrderedQueue[Request] = OrderedQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def push(self, request: Request) -> None:
        """See `QueuePolicy`."""
        self._waiting.add(request, {request.scheduling.adapter: self.rank(request)})

    def remove(self, request: Request) -> None:
        """See `QueuePolicy`."""
        self._waiting.remove(request)

    def candidates(
        self, now_ns: int = 0, open_lanes: Callable[[], Lanes] = all_lanes
    ) -> Iterator[Request]:
        """See `QueuePolicy`."""
        key = BEFORE_ALL
        while (entry := self._waiting.after(key, open_lanes())) is not None:
            key, request = entry
            yield request

    def overdue(self, now_ns: int) -> Request | None:
        """Deadlines do not matter here."""
        return None

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Does not matter here."""

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Does not matter here."""

    def rank(self, request: Request) -> Key:
        """The arrival."""
        return (request.arrival,)

    def urgency(self, request: Request) -> Key:
        """All are alike."""
        return ()

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Never."""
        return False


def make_queue_policy(name: str, tenant_weights: Mapping[str, float]) -> QueuePolicy:
    """The policy called `name`. Only `fair` uses the weights; a tenant without one has weight 1.

    Raises ValueError that names the field, its value and what is allowed.
    """
    for tenant, weight in tenant_weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"tenant_weights[{tenant!r}] is {weight}; allowed: above 0, finite")
    names = [policy.value for policy in QueuePolicyName]
    if name not in names:
        raise ValueError(f"queue_policy is {name!r}; allowed: {', '.join(names)}")
    match QueuePolicyName(name):
        case QueuePolicyName.FCFS:
            return FcfsPolicy()
        case QueuePolicyName.PRIORITY:
            return UrgencyPolicy(_priority, refuses_late=False)
        case QueuePolicyName.FAIR:
            return FairSharePolicy(tenant_weights)
        case QueuePolicyName.DEADLINE:
            return UrgencyPolicy(_priority_and_deadline, refuses_late=True)
        case never:
            assert_never(never)


def _priority(request: Request) -> Key:
    return (request.scheduling.priority,)


def _priority_and_deadline(request: Request) -> Key:
    deadline_ns = request.scheduling.deadline_ns
    return (request.scheduling.priority, deadline_ns is None, deadline_ns or 0)
