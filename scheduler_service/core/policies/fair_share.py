"""Fair shares among tenants: the Virtual Token Counter.

Source: Sheng et al. 2023, "Fairness in Serving Large Language Models", Algorithm 2, with weights.
Each tenant has a counter of what it was served, and the tenant with the least is next. Beyond the
paper:

* A request pays for its uncached tokens when it is admitted first; when it comes back after a
  preemption or a lost step, computing them again is not its tenant's debt. Outputs are paid as they
  are sampled.
* If the first request of the next tenant cannot run, the other tenants' first requests follow, and
  then everybody's second, third, ...: no slot stays empty because of one large request.
* No tenant takes all places, rows and blocks; see `tenant_shares.py`.
* Tenants without any request are forgotten, those first that lose nothing by it.

As in the paper a tenant that begins to wait is put level with those who do. So if there is no end
of new tenants, the fair share of each goes to nothing, and older ones may wait without end. Where
callers are known to the service, nobody can make tenants up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from scheduler_service.core.policies.request_queue import (
    BEFORE_ALL,
    Key,
    LaneOf,
    Lanes,
    OrderedQueue,
    all_lanes,
    lane_of_adapter,
)
from scheduler_service.core.policies.tenant_shares import TenantShares
from scheduler_service.core.request import Request

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
MAX_IDLE_TENANTS = 8192


@dataclass(slots=True, eq=False)
class _Account:
    """What one tenant was served, divided by its weight, and its waiting requests by arrival.

    `num_new`: those of them that were never admitted; the others take nobody's place.
    """

    tenant: str
    price: int
    counter: int = 0
    num_new: int = 0
    waiting: OrderedQueue[Request] = field(default_factory=OrderedQueue)


class FairSharePolicy:
    """The first request of the tenant that was served least. Nobody is preempted for another.

    `tenant_weights`: positive; a tenant without one has weight 1. Every operation is O(log n) in
    the requests and tenants that wait, but for moving pointers. Implements `QueuePolicy`.
    """

    charges_outputs = True
    allows_bypasses = True
    refuses_late = False

    def __init__(
        self,
        tenant_weights: Mapping[str, float],
        max_idle_tenants: int = MAX_IDLE_TENANTS,
        lane_of: LaneOf = lane_of_adapter,
    ) -> None:
        self._lane_of = lane_of
        self.shares = TenantShares(tenant_weights)
        self._accounts: dict[str, _Account] = {}
        self._num_waiting = 0
        self._new: set[Request] = set()
        # Tenants that wait, by (counter, arrival of the lane's first request); right after
        # `_refresh`.
        self._order: OrderedQueue[_Account] = OrderedQueue()
        self._stale: dict[_Account, None] = {}
        self._last_to_leave: _Account | None = None
        # Unfinished requests that were admitted before; and finished ones, for a while.
        self._paid: dict[str, Request] = {}
        self._max_paid = 16
        self._max_idle_tenants = max_idle_tenants
        self._max_accounts = max_idle_tenants

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for account in self._accounts.values():
            yield from account.waiting

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        self.shares.weigh(weights)
        for account in self._accounts.values():
            account.price = self.shares.price(account.tenant)

    def has_place(self, tenant: str, num_places: int) -> bool:
        """No tenant fills all places: whoever was refused would never become known."""
        account = self._accounts.get(tenant)
        num_held = 0 if account is None else account.num_new
        num_left = num_places - len(self._new) - 1
        return num_left >= 0 and self.shares.leaves_enough(tenant, num_held, num_left)

    def push(self, request: Request) -> None:
        account = self._account(request.scheduling.tenant)
        if not account.waiting:
            # Nobody saves up service by not asking for it.
            account.counter = max(account.counter, self._level())
        account.waiting.add(request, {self._lane_of(request): (request.arrival,)})
        self.shares.begins(account.tenant, request.request_id)
        self._num_waiting += 1
        if self._has_paid(request):
            # It may be another object that came back.
            self._paid[request.request_id] = request
        else:
            self._new.add(request)
            account.num_new += 1
        self._stale[account] = None

    def remove(self, request: Request) -> None:
        account = self._accounts[request.scheduling.tenant]
        account.waiting.remove(request)
        self._num_waiting -= 1
        if request in self._new:
            self._new.remove(request)
            account.num_new -= 1
        if not self._has_paid(request):
            self.shares.ends(account.tenant, request.request_id)
        self._stale[account] = None
        self._last_to_leave = account

    def change_lane(self, request: Request) -> None:
        account = self._accounts[request.scheduling.tenant]
        account.waiting.change_lane(request, self._lane_of(request))
        self._stale[account] = None

    def candidates(
        self, now_ns: int = 0, open_lanes: Callable[[], Lanes] = all_lanes
    ) -> Iterator[Request]:
        """Tenants' first requests by counter, then their second, and so on."""
        tried: dict[_Account, Key] = {}
        yield from self._first_requests(tried, open_lanes)
        yield from self._further_requests(tried, open_lanes)

    def overdue(self, now_ns: int) -> Request | None:
        return None

    @property
    def next_deadline_ns(self) -> int | None:
        return None

    def ended(self, request_id: str) -> None:
        request = self._paid.pop(request_id, None)
        if request is not None:
            self.shares.ends(request.scheduling.tenant, request_id)

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Charges the tenant, unless the request was admitted before."""
        if self._has_paid(request):
            return
        if len(self._paid) >= self._max_paid:
            self._forget_finished()
        self._paid[request.request_id] = request
        self._charge(self._account(request.scheduling.tenant), INPUT_WEIGHT * num_uncached_tokens)

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Charges the tenant."""
        self._charge(self._account(tenant), OUTPUT_WEIGHT * num_tokens)

    def rank(self, request: Request) -> Key:
        return (request.arrival,)

    def urgency(self, request: Request) -> Key:
        return ()

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Never: the tenant that was served more pays by waiting."""
        return False

    def may_pass(self, request: Request, other: Request) -> bool:
        """Returns whether `request` is of another tenant than `other`, served no more than it."""
        tenant, other_tenant = request.scheduling.tenant, other.scheduling.tenant
        served, served_other = self._accounts.get(tenant), self._accounts.get(other_tenant)
        if tenant == other_tenant or served_other is None:
            return False
        counter = 0 if served is None else served.counter
        if served is None or not served.waiting:
            counter = max(counter, self._level())  # see `push`
        return counter <= served_other.counter

    # -- the order -----------------------------------------------------------------------------

    def _first_requests(
        self, tried: dict[_Account, Key], open_lanes: Callable[[], Lanes]
    ) -> Iterator[Request]:
        """Who is admitted is met again, with its new counter and next request."""
        place = BEFORE_ALL
        in_vain: set[_Account] = set()
        while (tenant_entry := self._next_tenant(place, lanes := open_lanes())) is not None:
            place, account = tenant_entry
            entry = account.waiting.after(tried.get(account, BEFORE_ALL), lanes)
            # Whoever was tried in vain is met again in another lane.
            if entry is not None and account not in in_vain:
                tried[account], request = entry
                yield request
                if request in account.waiting:
                    in_vain.add(account)

    def _further_requests(
        self, tried: dict[_Account, Key], open_lanes: Callable[[], Lanes]
    ) -> Iterator[Request]:
        """Every tenant's first requests have been tried in vain."""
        turns = [
            (0, account.counter, *entry, account)
            for account, key in tried.items()
            if (entry := account.waiting.after(key, open_lanes())) is not None
        ]
        heapify(turns)
        while turns:
            num_in_vain, _, key, request, account = heappop(turns)
            lanes = open_lanes()
            # Its lane may have been closed since.
            if lanes is None or self._lane_of(request) in lanes:
                yield request
                num_in_vain += request in account.waiting
            entry = account.waiting.after(key, open_lanes())
            if entry is not None:
                heappush(turns, (num_in_vain, account.counter, *entry, account))

    def _next_tenant(self, place: Key, lanes: Lanes) -> tuple[Key, _Account] | None:
        self._refresh()
        return self._order.after(place, lanes)

    def _refresh(self) -> None:
        """Puts the tenants whose counter or first request has changed at their places."""
        for account in self._stale:
            if account in self._order:
                self._order.remove(account)
        for account in self._stale:
            if account.waiting:
                firsts = account.waiting.firsts().items()
                keys = {lane: (account.counter, first.arrival) for lane, first in firsts}
                self._order.add(account, keys)
        self._stale.clear()

    # -- the accounts --------------------------------------------------------------------------

    def _level(self) -> int:
        """The least counter of those who wait, or that of the last who did; never decreases."""
        self._refresh()
        account = self._order.first() or self._last_to_leave
        return 0 if account is None else account.counter

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._max_accounts:
                self.forget_idle_tenants()
            account = _Account(tenant, self.shares.price(tenant))
            self._accounts[tenant] = account
        return account

    def _charge(self, account: _Account, service: int) -> None:
        account.counter += service * account.price
        if account.waiting:
            self._stale[account] = None

    def _has_paid(self, request: Request) -> bool:
        """Whether it was admitted before; not if that was another request with the same id."""
        paid = self._paid.get(request.request_id)
        return paid is not None and not paid.is_finished

    def _forget_finished(self) -> None:
        finished = [request for request in self._paid.values() if request.is_finished]
        for request in finished:
            self.ended(request.request_id)
        self._max_paid = 2 * len(self._paid) + 16

    def forget_idle_tenants(self) -> None:
        """Forgets tenants that have no request; called in time by the policy itself.

        Whoever is not above the level would be lifted to it anyway. Of those above, as many are
        forgotten as are too many, the lowest first: they gain what they were above the level.
        """
        self._forget_finished()
        busy = {request.scheduling.tenant for request in self._paid.values()}
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
