"""Order of waiting requests by the keys of a policy, with turns that prevent starvation."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_service.scheduler.queue.ordered_queue import (
    BEFORE_ALL,
    Key,
    Lane,
    Lanes,
    OpenLanes,
    OrderedQueue,
    WaitingLanes,
)
from scheduler_service.scheduler.queue.queue_policy import QueuePolicy, rank_of
from scheduler_service.scheduler.values import Request

TURN_EVERY = 8
_ONLY_LANE: Lane = ("", "")


class KeyOrder:
    """Order of a policy without shares of tenants.

    If the policy allows bypasses, requests take turns: after TURN_EVERY admissions by key, the turn
    goes to the request that has waited longest. That request becomes *protected*: it goes before
    all unprotected requests, in the order of arrival, and no waiting request may preempt it. So a
    waiting request has its turn, or is admitted earlier, within (TURN_EVERY + 1) * (m + 1)
    admissions, whatever arrives later; m counts the older requests that are not protected, waiting
    and running. Protected requests that come back are not counted: they take no turn. Requests with
    an adapter have separate turns, since they may wait for an adapter slot, which no request
    without an adapter can free.
    """

    def __init__(self, policy: QueuePolicy, lanes: WaitingLanes) -> None:
        self._policy = policy
        self._lanes = lanes
        # Requests that may become overdue are kept apart, so that any number of them is skipped at
        # once.
        self._lasting: OrderedQueue[Request] = OrderedQueue()
        self._expiring: OrderedQueue[Request] = OrderedQueue()
        self._by_deadline: OrderedQueue[Request] = OrderedQueue()
        self._turns = (_Turns(), _Turns())

    def __len__(self) -> int:
        return len(self._lasting) + len(self._expiring)

    def has_place(self, tenant: str, num_places: int) -> bool:
        """Returns whether a queue of `num_places` accepts one more new request."""
        return len(self) < num_places

    def push(self, request: Request) -> None:
        """Adds a request that is not queued."""
        deadline_ns, rank = request.scheduling.deadline_ns, rank_of(self._policy, request)
        queue = self._lasting
        if self._policy.refuses_late and deadline_ns is not None and expires(request):
            assert rank[-2] == deadline_ns, "a policy with refuses_late must order by deadline"
            queue = self._expiring
            self._by_deadline.add(request, _ONLY_LANE, (deadline_ns, request.arrival))
        queue.add(request, self._lanes.of(request), rank)
        self._turns_of(request).waiting.add(request, _ONLY_LANE, (request.arrival,))

    def remove(self, request: Request) -> None:
        """Removes a queued request."""
        if request in self._expiring:
            self._expiring.remove(request)
            self._by_deadline.remove(request)
        else:
            self._lasting.remove(request)
        self._turns_of(request).waiting.remove(request)

    def change_lane(self, request: Request) -> None:
        """Moves a queued request to its new lane."""
        queue = self._expiring if request in self._expiring else self._lasting
        queue.change_lane(request, self._lanes.of(request))

    def begun(self, request: Request, num_uncached_tokens: int) -> None:
        """Counts an admission; protects `request`, which is still queued, if it has the turn."""
        if not self._policy.allows_bypasses:
            return
        own = self._turns_of(request)
        for turns in self._turns:
            if turns is not own or request is not own.holder:
                turns.num_since += 1
            elif not request.is_protected:
                request.is_protected = True
                turns.num_since = 0

    def has_turn(self, request: Request) -> bool:
        """Returns whether a waiting request has the turn."""
        return request is self._turns_of(request).holder

    def candidates(self, now_ns: int, open_lanes: OpenLanes) -> Iterator[Request]:
        """Iterates over requests by key; the request that has the turn comes first.

        Lazy, as `WaitingQueue.candidates`.
        """
        seen: set[Request] = set()
        key = BEFORE_ALL
        while True:
            lanes = self._lanes.select(open_lanes)
            request = self._whose_turn(seen, now_ns, lanes)
            if request is None:
                entry = self._after(key, now_ns, lanes)
                if entry is None:
                    return
                key, request = entry
            if request not in seen:
                seen.add(request)
                yield request

    def overdue(self, now_ns: int) -> Request | None:
        """Returns a request whose deadline is past, else None; first those next in turn."""
        firsts = [turns.waiting.first() for turns in self._turns]
        for request in (*firsts, self._by_deadline.first()):
            if request is not None and self._is_overdue(request, now_ns):
                return request
        return None

    @property
    def next_deadline_ns(self) -> int | None:
        """Earliest deadline after which a request is overdue, in ns; None without one."""
        first = self._by_deadline.first()
        return None if first is None else first.scheduling.deadline_ns

    # -- turns and deadlines -----------------------------------------------------------------------

    def _turns_of(self, request: Request) -> _Turns:
        return self._turns[bool(request.scheduling.adapter)]

    def _whose_turn(self, seen: set[Request], now_ns: int, lanes: Lanes) -> Request | None:
        """Returns a request that has a turn, if not seen, not overdue, and in an open lane."""
        for turns in self._turns:
            request = turns.holder
            if request is None or request in seen or self._is_overdue(request, now_ns):
                continue
            if lanes is None or self._lanes.of(request) in lanes:
                return request
        return None

    def _after(self, key: Key, now_ns: int, lanes: Lanes) -> tuple[Key, Request] | None:
        """Returns the next key and request that is not overdue.

        Skips overdue requests class by class.
        """
        lasting = self._lasting.after(key, lanes)
        expiring = self._expiring.after(key, lanes)
        while expiring is not None and self._is_overdue(expiring[1], now_ns):
            # No key lies between this one and the first of its class whose deadline is not past.
            expiring = self._expiring.after((*expiring[0][:-2], now_ns), lanes)
        if lasting is None or expiring is None:
            return lasting or expiring
        return min(lasting, expiring, key=lambda entry: entry[0])

    def _is_overdue(self, request: Request, now_ns: int) -> bool:
        deadline_ns = request.scheduling.deadline_ns
        return deadline_ns is not None and deadline_ns < now_ns and request in self._expiring


class _Turns:
    """Requests that take turns among themselves. `num_since`: admissions since the last turn."""

    def __init__(self) -> None:
        self.waiting: OrderedQueue[Request] = OrderedQueue()
        self.num_since = 0

    @property
    def holder(self) -> Request | None:
        """Request that has the turn; None if no turn is due."""
        return self.waiting.first() if self.num_since >= TURN_EVERY else None


def expires(request: Request) -> bool:
    """Returns whether a deadline ends a request while it waits.

    False for a request that has tokens, or may get some from a step in flight.
    """
    has_tokens = any(len(s.token_ids) > s.num_prompt_tokens for s in request.sequences)
    return not (request.is_protected or request.num_preemptions > 0 or has_tokens)
