"""The waiting queue: the requests that no engine has, in the order of a queue policy.

One queue serves any number of engines. Whatever depends on all requests of the scheduler is counted
here once: the tenants' counters and activity, turns against starvation, and which requests were
charged already. What an engine holds (rows, blocks, preempted requests) is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from scheduler_service.core.policies.queue_policy import QueuePolicy
from scheduler_service.core.policies.request_queue import Key, Lanes, all_lanes
from scheduler_service.core.policies.tenant_shares import TenantShares
from scheduler_service.core.request import Request


class Waiting(Protocol):
    """What an engine that plans a step sees of the waiting queue."""

    @property
    def num_waiting(self) -> int:
        """Waiting requests, whichever engine they begin at."""

    @property
    def waits_since_ns(self) -> int | None:
        """When the request that has waited longest was queued; None if none waits."""

    def candidates(self, open_lanes: Callable[[], Lanes] = all_lanes) -> Iterator[Request]:
        """Iterates over the requests that the engine may begin, in the order of the queue."""

    def waits_here(self, request: Request) -> bool:
        """Returns whether a request that lacks room here keeps others waiting, in the end."""


class WaitingQueue:
    """Waiting requests, and the order of all requests, waiting or running.

    `now_ns`: the time of the last `tick`; deadlines and waiting times are measured by it.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        # By id, the one that has waited longest first.
        self._requests: dict[str, Request] = {}
        # Requests that have begun since `take_begun`.
        self._begun: list[Request] = []
        self.now_ns = 0

    # -- state -------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Sets the time."""
        self.now_ns = now_ns
        if self.shares is not None:
            self.shares.now_ns = now_ns

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the waiting requests, the one that has waited longest first."""
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def get(self, request_id: str) -> Request | None:
        """Returns the waiting request with this id, if there is one."""
        return self._requests.get(request_id)

    def has_place(self, tenant: str, num_places: int) -> bool:
        """Returns whether a queue of `num_places` accepts one more new request of `tenant`."""
        return self._policy.has_place(tenant, num_places)

    @property
    def waits_since_ns(self) -> int | None:
        """When the request that has waited longest was queued; None if none waits."""
        first = next(iter(self._requests.values()), None)
        return None if first is None else first.queued_at_ns

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._requests)

    # -- requests come and go ----------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """Adds a request that is new, or that comes back from an engine with its old arrival."""
        request.queued_at_ns = self.now_ns
        self._requests[request.request_id] = request
        self._policy.push(request)

    def remove(self, request: Request) -> None:
        """Removes a waiting request that has not begun."""
        del self._requests[request.request_id]
        self._policy.remove(request)

    def begun(self, request: Request, num_uncached_tokens: int) -> None:
        """Removes a waiting request that an engine has begun, and charges its tenant.

        `num_uncached_tokens`: tokens that the engine has to compute. May set
        `request.is_protected`.
        """
        self._policy.admitted(request, num_uncached_tokens)
        self.remove(request)
        self._begun.append(request)

    def take_begun(self) -> list[Request]:
        """Returns the requests that have begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def ended(self, request: Request) -> None:
        """Forgets a request that has ended, wherever it was."""
        if request in self:
            self.remove(request)
        self._policy.ended(request.request_id)

    def charge(self, num_sampled: Mapping[str, int]) -> None:
        """Charges tenants for output tokens."""
        for tenant, num_tokens in num_sampled.items():
            self._policy.sampled(tenant, num_tokens)

    def waits_here(self, request: Request) -> bool:
        """Returns whether a request that lacks room keeps others waiting, in the end."""
        return True

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants new weights; a tenant without one has 1."""
        self._policy.weigh_tenants(weights)

    # -- the order ---------------------------------------------------------------------------------

    def candidates(self, open_lanes: Callable[[], Lanes] = all_lanes) -> Iterator[Request]:
        """Iterates over waiting requests in the order in which they should begin now.

        Lazy: between two of them requests may begin and leave, and the order then reflects it. What
        is pushed meanwhile may be left to the next call. Yields requests of `open_lanes` only,
        which is called anew for each; requests that are `overdue` may be left out.
        """
        return self._policy.candidates(self.now_ns, open_lanes)

    def overdue(self) -> Request | None:
        """Returns a waiting request whose deadline is past, if the policy refuses late ones."""
        return self._policy.overdue(self.now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `overdue` returns a request if nothing is pushed before; None for never."""
        return self._policy.next_deadline_ns

    def rank(self, request: Request) -> Key:
        """Returns the place of a request in the order; unique, changes only when it begins."""
        return self._policy.rank(request)

    def step_class(self, request: Request) -> Key:
        """Returns the class of a request; smaller ones get the tokens of a step first."""
        return self._policy.urgency(request)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Returns whether `running` may be preempted so that `waiting` can begin."""
        return self._policy.may_preempt(waiting, running)

    def may_pass(self, request: Request, other: Request) -> bool:
        """Returns whether `request` may begin before `other`, which holds a reservation.

        `other` was passed as often as the rules allow, or was preempted and lacks room.
        """
        return self._policy.may_pass(request, other)

    @property
    def shares(self) -> TenantShares | None:
        """What tenants may take of rows and blocks; None where tenants are not told apart."""
        return self._policy.shares

    @property
    def allows_bypasses(self) -> bool:
        """Whether requests may begin before one that lacks blocks or rows."""
        return self._policy.allows_bypasses

    @property
    def preempts(self) -> bool:
        """Whether `may_preempt` is ever true."""
        return self.allows_bypasses and self.shares is None

    @property
    def charges_outputs(self) -> bool:
        """Whether `charge` matters."""
        return self._policy.charges_outputs

    @property
    def refuses_late(self) -> bool:
        """Whether a waiting request ends when it cannot meet its deadline any more."""
        return self._policy.refuses_late
