"""Waiting queue: the requests that no engine has, in the order of a queue policy.

One queue serves any number of engines. State that depends on all requests of the scheduler is kept
here, once: counters and activity of tenants, turns against starvation, and which requests were
charged already. State of one engine (rows, blocks, preempted requests) belongs to the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from scheduler_service.scheduler.queue.key_order import KeyOrder
from scheduler_service.scheduler.queue.ordered_queue import Key, OpenLanes, WaitingLanes
from scheduler_service.scheduler.queue.queue_policy import QueuePolicy, TenantShares, rank_of
from scheduler_service.scheduler.queue.tenant_order import MAX_IDLE_TENANTS, TenantOrder
from scheduler_service.scheduler.values import Request

_PROTECTED: Key = (0,)


class Waiting(Protocol):
    """Waiting queue as seen by an engine that plans a step."""

    @property
    def is_empty(self) -> bool:
        """Whether no waiting request could ever begin at this engine."""

    @property
    def waits_since_ns(self) -> int | None:
        """Time in ns at which the oldest waiting request was queued; None for an empty queue."""

    def candidates(self, open_lanes: OpenLanes) -> Iterator[Request]:
        """Iterates over the requests that the engine may begin, in the order of the queue.

        Only the adapters of `open_lanes` are read.
        """

    def waits_here(self, request: Request) -> bool:
        """Returns whether a request that lacks room here eventually blocks later requests."""


class WaitingQueue:
    """Waiting requests, and the order of all requests, waiting or running.

    The owner reports every request that `ended`, and sampled tokens by `charge`. The owner calls
    `take_begun` after each planned step; until then the queue keeps the requests that have begun.
    `now_ns`: time of the last `tick`, by which deadlines and waiting times are measured.
    """

    def __init__(self, policy: QueuePolicy, max_idle_tenants: int = MAX_IDLE_TENANTS) -> None:
        self._policy = policy
        # Waiting requests by id, the longest-waiting first.
        self._requests: dict[str, Request] = {}
        # Requests that have begun since the last `take_begun`.
        self._begun: list[Request] = []
        self._lanes = WaitingLanes()
        # Exactly one of both: order by keys, or by the counters of tenants.
        self._keys: KeyOrder | None = None
        self._tenants: TenantOrder | None = None
        if policy.shares is None:
            self._keys = KeyOrder(policy, self._lanes)
        else:
            self._tenants = TenantOrder(policy, policy.shares, self._lanes, max_idle_tenants)
        # Whether the policy overrides `may_preempt`.
        self.preempts = type(policy).may_preempt is not QueuePolicy.may_preempt
        self.now_ns = 0

    @property
    def _order(self) -> KeyOrder | TenantOrder:
        if self._keys is not None:
            return self._keys
        assert self._tenants is not None
        return self._tenants

    # -- state -------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Sets the current time."""
        self.now_ns = now_ns
        if self.shares is not None:
            self.shares.now_ns = now_ns

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the waiting requests, the longest-waiting first."""
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def get(self, request_id: str) -> Request | None:
        """Returns the waiting request with this id; None if there is none."""
        return self._requests.get(request_id)

    def has_place(self, tenant: str, num_places: int) -> bool:
        """Returns whether a queue of `num_places` accepts one more new request of `tenant`."""
        return self._order.has_place(tenant, num_places)

    @property
    def waits_since_ns(self) -> int | None:
        """Time in ns at which the oldest waiting request was queued; None for an empty queue."""
        first = next(iter(self._requests.values()), None)
        return None if first is None else first.queued_at_ns

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._requests

    @property
    def tenants(self) -> Collection[str]:
        """Tenants that have waiting requests; empty for a policy without shares."""
        return () if self._tenants is None else self._tenants.tenants

    # -- arrivals and departures -------------------------------------------------------------------

    def push(self, request: Request, group: str = "") -> None:
        """Adds a new request, or a request returned by an engine, which keeps its arrival number.

        `group`: name of the set of requests that fit the same engines as this one.
        """
        request.queued_at_ns = self.now_ns
        self._requests[request.request_id] = request
        self._lanes.put(request, group)
        self._order.push(request)

    def group_of(self, request: Request) -> str:
        """Returns the group of a waiting request."""
        return self._lanes.of(request)[0]

    def set_group(self, request: Request, group: str) -> None:
        """Moves a waiting request to another group."""
        self._lanes.put(request, group)
        self._order.change_lane(request)

    def remove(self, request: Request) -> None:
        """Removes a waiting request that has not begun."""
        self._order.remove(request)
        self._lanes.remove(request)
        del self._requests[request.request_id]

    def begun(self, request: Request, num_uncached_tokens: int, *, is_beside: bool = False) -> None:
        """Removes a waiting request that an engine has begun, and charges its tenant.

        `num_uncached_tokens`: tokens that the engine has to compute. `is_beside`: a short prompt
        that began beside others, which brings no turn nearer. May set `request.is_protected`.
        """
        if self._tenants is not None or not is_beside:
            self._order.begun(request, num_uncached_tokens)
        self.remove(request)
        self._begun.append(request)

    def take_begun(self) -> list[Request]:
        """Returns the requests that have begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended, wherever it was."""
        request = self._requests.get(request_id)
        if request is not None:
            self.remove(request)
        if self._tenants is not None:
            self._tenants.ended(request_id)

    def charge(self, num_sampled: Mapping[str, int]) -> None:
        """Charges tenants for output tokens."""
        if self._tenants is not None:
            for tenant, num_tokens in num_sampled.items():
                self._tenants.sampled(tenant, num_tokens)

    def waits_here(self, request: Request) -> bool:
        """Returns whether a request that lacks room eventually blocks later ones: always True."""
        return True

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Sets the weights of tenants; a tenant without a weight has weight 1."""
        if self._tenants is not None and self.shares is not None:
            self.shares.weigh(weights)
            self._tenants.weigh_tenants()

    def forget_idle_tenants(self) -> None:
        """Forgets idle tenants; the queue also does so by itself when accounts are many."""
        if self._tenants is not None:
            self._tenants.forget_idle_tenants()

    # -- order -------------------------------------------------------------------------------------

    def num_of_adapters(self) -> Counter[str]:
        """Returns the number of waiting requests of each adapter, empty for none."""
        return self._lanes.num_of_adapters()

    def candidates(self, open_lanes: OpenLanes | None = None) -> Iterator[Request]:
        """Iterates over waiting requests in the order in which they should begin now.

        Lazy: requests may begin and leave between two steps of the iteration, which then follows
        the new order. Requests pushed meanwhile may be left to the next call. Yields requests of
        `open_lanes` only, which is read again for each request; `overdue` requests may be left out.
        """
        open_lanes = open_lanes or OpenLanes()
        if self._keys is not None:
            return self._keys.candidates(self.now_ns, open_lanes)
        assert self._tenants is not None
        return self._tenants.candidates(open_lanes)

    def overdue(self) -> Request | None:
        """Returns a waiting request that is past its deadline, if the policy refuses late ones."""
        return None if self._keys is None else self._keys.overdue(self.now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """Time in ns after which `overdue` returns a request if nothing is pushed; else None."""
        return None if self._keys is None else self._keys.next_deadline_ns

    def rank(self, request: Request) -> Key:
        """Returns the unique place of a request in the order; it changes only at its beginning."""
        return rank_of(self._policy, request)

    def step_class(self, request: Request) -> Key:
        """Returns the class of a request; smaller classes get the tokens of a step first.

        Where the policy has classes, protected requests are in one class before all others, and so
        is the request that has the turn: it becomes protected when it begins.
        """
        step_class = self._policy.step_class(request)
        if not step_class or self._keys is None:
            return step_class
        if request.is_protected or self._keys.has_turn(request):
            return _PROTECTED
        return (1, *step_class)

    def has_turn(self, request: Request) -> bool:
        """Returns whether a waiting request comes first because it has waited longest."""
        return self._keys is not None and self._keys.has_turn(request)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Returns whether `running` may be preempted so that `waiting` can begin."""
        return not running.is_protected and self._policy.may_preempt(waiting, running)

    def may_pass(self, request: Request, other: Request) -> bool:
        """Returns whether `request` may begin before `other`, which blocks later requests.

        `other` was passed as often as the rules allow, or was preempted and lacks room.
        """
        return self._tenants is not None and self._tenants.may_pass(request, other)

    def may_go_before(self, waiting: Request, preempted: Request) -> bool:
        """Returns whether a waiting request may begin before a preempted one."""
        return self.may_preempt(waiting, preempted) or self.may_pass(waiting, preempted)

    @property
    def shares(self) -> TenantShares | None:
        """Shares of tenants in rows and blocks; None where tenants are not told apart."""
        return self._policy.shares

    @property
    def allows_bypasses(self) -> bool:
        """Whether requests may begin before one that lacks blocks or rows."""
        return self._policy.allows_bypasses

    @property
    def charges_outputs(self) -> bool:
        """Whether `charge` has any effect."""
        return self._tenants is not None

    @property
    def refuses_late(self) -> bool:
        """Whether a waiting request ends when it can no longer meet its deadline."""
        return self._policy.refuses_late

    @property
    def keeps_targets(self) -> bool:
        """Whether steps with prompts keep the times between tokens that requests want."""
        return self._policy.keeps_targets
