"""The waiting queue: the requests that no engine has, in the order of a queue policy.

One queue serves any number of engines. Whatever depends on all requests of the scheduler is counted
here once: the tenants' counters and activity, turns against starvation, and which requests were
charged already. What an engine holds (rows, blocks, preempted requests) is the engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from scheduler_service.scheduler.queue.key_order import KeyOrder
from scheduler_service.scheduler.queue.ordered_queue import Key, OpenLanes, WaitingLanes
from scheduler_service.scheduler.queue.queue_policy import QueuePolicy, TenantShares, rank_of
from scheduler_service.scheduler.queue.tenant_order import MAX_IDLE_TENANTS, TenantOrder
from scheduler_service.scheduler.values.request import Request

_PROTECTED: Key = (0,)


class Waiting(Protocol):
    """What an engine that plans a step sees of the waiting queue."""

    @property
    def is_empty(self) -> bool:
        """Whether no waiting request could ever begin at this engine."""

    @property
    def waits_since_ns(self) -> int | None:
        """Time in ns at which the oldest waiting request was queued; None for an empty queue."""

    def candidates(self, open_lanes: OpenLanes) -> Iterator[Request]:
        """Iterates over the requests that the engine may begin, in the order of the queue.

        Of `open_lanes`, the adapters count.
        """

    def waits_here(self, request: Request) -> bool:
        """Returns whether a request that lacks room here keeps others waiting, in the end."""


class WaitingQueue:
    """Waiting requests, and the order of all requests, waiting or running.

    Its owner tells it of every request that `ended`, and of sampled tokens by `charge`. It calls
    `take_begun` after each step that was planned: until then those that have begun are kept.
    `now_ns`: the time of the last `tick`; deadlines and waiting times are measured by it.
    """

    def __init__(self, policy: QueuePolicy, max_idle_tenants: int = MAX_IDLE_TENANTS) -> None:
        self._policy = policy
        # By id, the one that has waited longest first.
        self._requests: dict[str, Request] = {}
        # Requests that have begun since `take_begun`.
        self._begun: list[Request] = []
        self._lanes = WaitingLanes()
        # By keys, or by the counters of tenants.
        self._keys: KeyOrder | None = None
        self._tenants: TenantOrder | None = None
        if policy.shares is None:
            self._keys = KeyOrder(policy, self._lanes)
        else:
            self._tenants = TenantOrder(policy, policy.shares, self._lanes, max_idle_tenants)
        # Whether the policy has a rule of its own for it.
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
        """Tenants that have waiting requests, where there are shares."""
        return () if self._tenants is None else self._tenants.tenants

    # -- requests come and go ----------------------------------------------------------------------

    def push(self, request: Request, group: str = "") -> None:
        """Adds a request that is new, or that comes back from an engine with its old arrival.

        `group`: names the engines that it fits, together with all other requests of the group.
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

    def begun(self, request: Request, num_uncached_tokens: int) -> None:
        """Removes a waiting request that an engine has begun, and charges its tenant.

        `num_uncached_tokens`: tokens that the engine has to compute. May set
        `request.is_protected`.
        """
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
        """Returns whether a request that lacks room keeps others waiting, in the end."""
        return True

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants new weights; a tenant without one has 1."""
        if self._tenants is not None and self.shares is not None:
            self.shares.weigh(weights)
            self._tenants.weigh_tenants()

    def forget_idle_tenants(self) -> None:
        """Forgets tenants that have no request; called in time by the queue itself."""
        if self._tenants is not None:
            self._tenants.forget_idle_tenants()

    # -- the order ---------------------------------------------------------------------------------

    def candidates(self, open_lanes: OpenLanes | None = None) -> Iterator[Request]:
        """Iterates over waiting requests in the order in which they should begin now.

        Lazy: between two of them requests may begin and leave, and the order then reflects it. What
        is pushed meanwhile may be left to the next call. Yields requests of `open_lanes` only,
        which is read anew for each; requests that are `overdue` may be left out.
        """
        open_lanes = open_lanes or OpenLanes()
        if self._keys is not None:
            return self._keys.candidates(self.now_ns, open_lanes)
        assert self._tenants is not None
        return self._tenants.candidates(open_lanes)

    def overdue(self) -> Request | None:
        """Returns a waiting request whose deadline is past, if the policy refuses late ones."""
        return None if self._keys is None else self._keys.overdue(self.now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `overdue` returns a request if nothing is pushed before; None for never."""
        return None if self._keys is None else self._keys.next_deadline_ns

    def rank(self, request: Request) -> Key:
        """Returns the place of a request in the order; unique, changes only when it begins."""
        return rank_of(self._policy, request)

    def step_class(self, request: Request) -> Key:
        """Returns the class of a request; smaller ones get the tokens of a step first.

        Where the policy has classes, protected requests are in one before all others, and so is the
        request that has the turn: it is protected as soon as it begins.
        """
        step_class = self._policy.step_class(request)
        if not step_class or self._keys is None:
            return step_class
        if request.is_protected or self._keys.has_turn(request):
            return _PROTECTED
        return (1, *step_class)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Returns whether `running` may be preempted so that `waiting` can begin."""
        return not running.is_protected and self._policy.may_preempt(waiting, running)

    def may_pass(self, request: Request, other: Request) -> bool:
        """Returns whether `request` may begin before `other`, which all others have to wait for.

        `other` was passed as often as the rules allow, or was preempted and lacks room.
        """
        return self._tenants is not None and self._tenants.may_pass(request, other)

    def may_go_before(self, waiting: Request, preempted: Request) -> bool:
        """Returns whether a waiting request may begin before a preempted one."""
        return self.may_preempt(waiting, preempted) or self.may_pass(waiting, preempted)

    @property
    def shares(self) -> TenantShares | None:
        """What tenants may take of rows and blocks; None where tenants are not told apart."""
        return self._policy.shares

    @property
    def allows_bypasses(self) -> bool:
        """Whether requests may begin before one that lacks blocks or rows."""
        return self._policy.allows_bypasses

    @property
    def charges_outputs(self) -> bool:
        """Whether `charge` matters."""
        return self._tenants is not None

    @property
    def refuses_late(self) -> bool:
        """Whether a waiting request ends when it cannot meet its deadline any more."""
        return self._policy.refuses_late
