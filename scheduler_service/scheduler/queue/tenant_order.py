"""Order of waiting requests by the service of their tenants: the Virtual Token Counter.

Source: Sheng et al. 2023, "Fairness in Serving Large Language Models", Algorithm 2, with weights.
Each tenant has a counter of the service that it got from all engines, and the tenant with the
smallest counter is next. Beyond the paper:

* A request pays for its uncached tokens when it first begins. When it comes back after a preemption
  or a lost step, the recompute is not charged to its tenant. Outputs are charged as they are
  sampled.
* If the first request of the next tenant cannot run, the first requests of the other tenants
  follow, and then the second requests of all tenants, and so on: no slot stays empty because of one
  large request.
* No tenant takes all places, rows and blocks; see `TenantShares` in `queue_policy.py`.
* Tenants without any request are forgotten, first those that lose nothing by it.

As in the paper, a tenant that begins to wait is lifted to the counter of the waiting tenants. So if
new tenants keep coming without end, the fair share of each goes to zero, and older tenants may
starve. Where callers are authenticated, no client can invent tenants.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from scheduler_service.scheduler.queue.ordered_queue import (
    BEFORE_ALL,
    Key,
    Lane,
    Lanes,
    OpenLanes,
    OrderedQueue,
    WaitingLanes,
)
from scheduler_service.scheduler.queue.queue_policy import QueuePolicy, TenantShares, rank_of
from scheduler_service.scheduler.values import Request

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
MAX_IDLE_TENANTS = 8192


@dataclass(slots=True, eq=False)
class _Account:
    """Account of one tenant: its service divided by its weight, and its waiting requests.

    `num_new`: waiting requests that never began; only these occupy places in the queue. `places`:
    position of the tenant among the tenants waiting in a lane (None: in any lane), as (counter,
    rank of its first request there, account); the counter may have grown since.
    """

    tenant: str
    price: int
    counter: int = 0
    num_new: int = 0
    waiting: OrderedQueue[Request] = field(default_factory=OrderedQueue)
    places: dict[Lane | None, _Place] = field(default_factory=dict)


# Ranks are unique, so comparisons of places never reach the accounts.
_Place: TypeAlias = tuple[int, Key, _Account]
# Start value that is smaller than all places.
_FIRST = (-1,)


class TenantOrder:
    """Order of waiting requests by the counters of their tenants.

    Every operation is O(log n) in the waiting requests and tenants, apart from moving pointers.
    Charging a tenant moves nothing: counters only grow, so a tenant is moved when it is met too
    early.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        shares: TenantShares,
        lanes: WaitingLanes,
        max_idle_tenants: int,
    ) -> None:
        self._policy = policy
        self._shares = shares
        self._lanes = lanes
        self._accounts: dict[str, _Account] = {}
        self._num_new = 0
        # Tenants that have waiting requests.
        self.tenants: set[str] = set()
        # Waiting tenants by lane, sorted by place.
        self._order: dict[Lane | None, list[_Place]] = {}
        self._last_to_leave: _Account | None = None
        # Tenants of unfinished requests, by request id; and ids of the requests that have begun.
        self._tenants: dict[str, str] = {}
        self._begun: set[str] = set()
        self._max_idle_tenants = max_idle_tenants
        self._max_accounts = max_idle_tenants

    def weigh_tenants(self) -> None:
        """Applies the changed weights of the shares to all accounts."""
        for account in self._accounts.values():
            account.price = self._shares.price(account.tenant)

    def has_place(self, tenant: str, num_places: int) -> bool:
        """Returns whether a queue of `num_places` accepts one more new request of `tenant`.

        No tenant may fill all places: a refused tenant would never become known.
        """
        account = self._accounts.get(tenant)
        num_held = 0 if account is None else account.num_new
        num_left = num_places - self._num_new - 1
        return num_left >= 0 and self._shares.leaves_enough(tenant, num_held, num_left)

    def push(self, request: Request) -> None:
        """Adds a request that is not queued."""
        account = self._account(request.scheduling.tenant)
        if not account.waiting:
            # A tenant saves up no service by not asking for it.
            account.counter = max(account.counter, self._level())
        self.tenants.add(account.tenant)
        lane = self._lanes.of(request)
        account.waiting.add(request, lane, rank_of(self._policy, request))
        self._tenants[request.request_id] = account.tenant
        self._shares.begins(account.tenant, request.request_id)
        self._count_new(account, request, 1)
        self._place(account, lane)

    def remove(self, request: Request) -> None:
        """Removes a queued request."""
        account = self._accounts[request.scheduling.tenant]
        account.waiting.remove(request)
        if not account.waiting:
            self.tenants.remove(account.tenant)
        self._count_new(account, request, -1)
        self._place(account, self._lanes.of(request))
        self._last_to_leave = account

    def change_lane(self, request: Request) -> None:
        """Moves a queued request to its new lane."""
        account = self._accounts[request.scheduling.tenant]
        old, lane = account.waiting.lane_of(request), self._lanes.of(request)
        account.waiting.change_lane(request, lane)
        self._place(account, old)
        self._place(account, lane)

    def begun(self, request: Request, num_uncached_tokens: int) -> None:
        """Charges a tenant for the input of a request that first begins and is still queued."""
        if request.request_id in self._begun:
            return
        account = self._accounts[request.scheduling.tenant]
        self._count_new(account, request, -1)
        self._begun.add(request.request_id)
        account.counter += INPUT_WEIGHT * num_uncached_tokens * account.price

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Charges a tenant for output tokens."""
        account = self._account(tenant)
        account.counter += OUTPUT_WEIGHT * num_tokens * account.price

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended and is not queued."""
        self._begun.discard(request_id)
        tenant = self._tenants.pop(request_id, None)
        if tenant is not None:
            self._shares.ends(tenant, request_id)

    def candidates(self, open_lanes: OpenLanes) -> Iterator[Request]:
        """Iterates over the tenants' first requests by counter, then their second, and so on.

        Lazy, as `WaitingQueue.candidates`.
        """
        tried: dict[_Account, Key] = {}
        yield from self._first_requests(tried, open_lanes)
        yield from self._further_requests(tried, open_lanes)

    def may_pass(self, request: Request, other: Request) -> bool:
        """Returns whether the tenant of `request` differs and was served no more than `other`'s."""
        tenant, other_tenant = request.scheduling.tenant, other.scheduling.tenant
        served, served_other = self._accounts.get(tenant), self._accounts.get(other_tenant)
        if tenant == other_tenant or served_other is None:
            return False
        counter = 0 if served is None else served.counter
        if served is None or not served.waiting:
            counter = max(counter, self._level())  # see `push`
        return counter <= served_other.counter

    # -- order of requests -------------------------------------------------------------------------

    def _first_requests(
        self, tried: dict[_Account, Key], open_lanes: OpenLanes
    ) -> Iterator[Request]:
        """Yields the first request of each tenant, by counter.

        A tenant whose request began is met again, with its new counter and its next request.
        """
        place: _Place | tuple[int] = _FIRST
        in_vain: set[_Account] = set()
        while found := self._next_tenant(place, lanes := self._lanes.select(open_lanes)):
            place, account = found, found[2]
            entry = account.waiting.after(tried.get(account, BEFORE_ALL), lanes)
            # A tenant whose request could not begin is met again in another lane.
            if entry is not None and account not in in_vain:
                tried[account], request = entry
                yield request
                if request in account.waiting:
                    in_vain.add(account)

    def _further_requests(
        self, tried: dict[_Account, Key], open_lanes: OpenLanes
    ) -> Iterator[Request]:
        """Yields later requests of tenants, after all first requests were tried in vain."""
        turns = [
            (0, account.counter, *entry, account)
            for account, key in tried.items()
            if (entry := account.waiting.after(key, self._lanes.select(open_lanes))) is not None
        ]
        heapify(turns)
        while turns:
            num_in_vain, _, key, request, account = heappop(turns)
            lanes = self._lanes.select(open_lanes)
            # The lane may have been closed since, or the request has left the queue.
            if request in account.waiting and (lanes is None or self._lanes.of(request) in lanes):
                yield request
                num_in_vain += request in account.waiting
            entry = account.waiting.after(key, self._lanes.select(open_lanes))
            if entry is not None:
                heappush(turns, (num_in_vain, account.counter, *entry, account))

    # -- order of tenants --------------------------------------------------------------------------

    def _next_tenant(self, place: _Place | tuple[int], lanes: Lanes) -> _Place | None:
        """Returns the place of the first tenant after `place` that waits in one of these lanes."""
        if lanes is None:
            return self._next_in(None, place)
        found = (self._next_in(lane, place) for lane in lanes if lane in self._order)
        return min((each for each in found if each is not None), default=None)

    def _next_in(self, lane: Lane | None, place: _Place | tuple[int]) -> _Place | None:
        order = self._order.get(lane, [])
        while (index := bisect_right(order, place)) < len(order):
            counter, rank, account = found = order[index]
            if counter == account.counter:
                return found
            # The tenant was charged since, so its place is further behind.
            del order[index]
            account.places[lane] = moved = (account.counter, rank, account)
            insort(order, moved)
        return None

    def _place(self, account: _Account, lane: Lane) -> None:
        """Updates the places of a tenant in a lane and overall, from its first waiting requests."""
        for each in (lane, None):
            first = account.waiting.after(BEFORE_ALL, None if each is None else (each,))
            rank, old = None if first is None else first[0], account.places.get(each)
            if old is not None:
                if old[1] == rank:
                    continue
                order = self._order[each]
                del order[bisect_left(order, old)], account.places[each]
                if not order:
                    del self._order[each]
            if rank is not None:
                account.places[each] = place = (account.counter, rank, account)
                insort(self._order.setdefault(each, []), place)

    # -- accounts ----------------------------------------------------------------------------------

    def _count_new(self, account: _Account, request: Request, change: int) -> None:
        if request.request_id not in self._begun:
            account.num_new += change
            self._num_new += change

    def _level(self) -> int:
        """Returns the least counter of waiting tenants, else of the last one that waited.

        Never decreases.
        """
        first = self._next_in(None, _FIRST)
        account = self._last_to_leave if first is None else first[2]
        return 0 if account is None else account.counter

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._max_accounts:
                self.forget_idle_tenants()
            account = _Account(tenant, self._shares.price(tenant))
            self._accounts[tenant] = account
        return account

    def forget_idle_tenants(self) -> None:
        """Forgets idle tenants: tenants without an unfinished request.

        Called when accounts are too many. A tenant that is not above the level would be lifted to
        it anyway. Of the idle tenants above the level, only the excess is forgotten, lowest
        counters first: each gains what it was above the level.
        """
        busy = set(self._tenants.values())
        level = self._level()
        idle = [
            account
            for account in self._accounts.values()
            if not account.waiting and account.tenant not in busy
        ]
        idle.sort(key=lambda account: account.counter)
        num_too_many = len(idle) - self._max_idle_tenants // 2
        for index, account in enumerate(idle):
            if index < num_too_many or account.counter <= level:
                del self._accounts[account.tenant]
        self._max_accounts = len(self._accounts) + max(1, self._max_idle_tenants // 2)
