"""Who is next: what a policy is, and which there are.

A policy holds the waiting requests, orders all requests and picks; it knows nothing of blocks, rows
or steps. One core has one policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from scheduler_service.core.policies.fair_share import FairSharePolicy
from scheduler_service.core.policies.fcfs import FcfsPolicy
from scheduler_service.core.policies.request_queue import (
    Key,
    LaneOf,
    Lanes,
    all_lanes,
    lane_of_adapter,
)
from scheduler_service.core.policies.tenant_shares import TenantShares
from scheduler_service.core.policies.urgency import (
    UrgencyPolicy,
    by_priority,
    by_priority_and_deadline,
)
from scheduler_service.core.request import Request


class QueuePolicy(Protocol):
    """The waiting requests, and an order of all requests of a core. Arrivals are unique.

    `charges_outputs`: whether `sampled` matters; where it does not, nobody needs to call it.
    `allows_bypasses`: whether others may run before one that lacks blocks or rows. `refuses_late`:
    whether a request ends that cannot meet its deadline any more. `shares`: what tenants may take
    of rows and blocks; None where that is whatever there is.
    """

    charges_outputs: bool
    allows_bypasses: bool
    refuses_late: bool

    @property
    def shares(self) -> TenantShares | None:
        """See above."""

    def __len__(self) -> int:
        """Requests waiting."""

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in a stable order of no meaning."""

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Tenants have other weights from now on; where there are shares."""

    def has_place(self, tenant: str, num_places: int) -> bool:
        """Whether the queue, if it has so many places, takes one more new request of `tenant`."""

    def push(self, request: Request) -> None:
        """Adds `request`, which is new, or was running and comes back with its old arrival."""

    def remove(self, request: Request) -> None:
        """Removes `request`, which must be here: it was admitted, or it has ended."""

    def change_lane(self, request: Request) -> None:
        """Takes note that `request`, which waits here, is in another lane now; see `LaneOf`."""

    def candidates(
        self, now_ns: int = 0, open_lanes: Callable[[], Lanes] = all_lanes
    ) -> Iterator[Request]:
        """Waiting requests in the order in which they should be admitted now, each at most once.

        Lazy: between two of them the caller may admit and remove the last one and push others,
        and the order then reflects it. What is pushed meanwhile may be left to the next iterator.
        Of other lanes than `open_lanes`, asked anew for each, there is none.
        What `overdue` returns may be left out, however much of it there is.
        """

    def overdue(self, now_ns: int) -> Request | None:
        """One of the requests that cannot meet their deadline any more, because it is past."""

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Takes note that `request`, which waits here, runs now; the caller then removes it.

        `num_uncached_tokens`: those of its tokens that have to be computed. May set
        `request.is_protected`.
        """

    @property
    def next_deadline_ns(self) -> int | None:
        """When `overdue` returns somebody, if nothing is pushed before; None for never."""

    def ended(self, request_id: str) -> None:
        """Takes note that a request, which does not wait here, has ended. Nobody needs to tell."""

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

    def may_pass(self, request: Request, other: Request) -> bool:
        """Returns whether `request` may begin before `other`, which holds a reservation.

        `other` was passed as often as the rules allow, or is swapped out and lacks room.
        """


# By the name that the operator gives; made from the weights of tenants.
QUEUE_POLICIES: Mapping[str, Callable[[Mapping[str, float], LaneOf], QueuePolicy]]
QUEUE_POLICIES = MappingProxyType(
    {
        "fcfs": lambda _, lane_of: FcfsPolicy(lane_of),
        "priority": lambda _, lane_of: UrgencyPolicy(
            by_priority, refuses_late=False, lane_of=lane_of
        ),
        "fair": lambda tenant_weights, lane_of: FairSharePolicy(tenant_weights, lane_of=lane_of),
        "deadline": lambda _, lane_of: UrgencyPolicy(
            by_priority_and_deadline, refuses_late=True, lane_of=lane_of
        ),
    }
)


def make_queue_policy(
    name: str, tenant_weights: Mapping[str, float], lane_of: LaneOf = lane_of_adapter
) -> QueuePolicy:
    """The policy called `name`. A tenant without a weight has 1.

    Raises ValueError that names the field, its value and what is allowed.
    """
    for tenant, weight in tenant_weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"tenant_weights[{tenant!r}] is {weight}; allowed: above 0, finite")
    if name not in QUEUE_POLICIES:
        raise ValueError(f"queue_policy is {name!r}; allowed: {', '.join(QUEUE_POLICIES)}")
    return QUEUE_POLICIES[name](tenant_weights, lane_of)
