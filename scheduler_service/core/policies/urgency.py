"""Waiting requests by urgency: priorities, deadlines, and turns so that nobody starves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from scheduler_service.core.policies.request_queue import (
    BEFORE_ALL,
    Key,
    LaneOf,
    Lanes,
    OrderedQueue,
    all_lanes,
    lane_of_adapter,
)
from scheduler_service.core.request import Request

TURN_EVERY = 8
_PROTECTED: Key = (0,)


class UrgencyPolicy:
    """The most urgent first, but nobody starves: requests take turns. Implements `QueuePolicy`.

    After TURN_EVERY admissions by urgency it is the turn of the request that has waited longest. It
    becomes *protected*: it goes before all that are not, in the order of arrival, and nobody who
    waits may preempt it. So a request that waits has its turn, or is admitted before, within
    (TURN_EVERY + 1) * (m + 1) admissions, whatever arrives later; m counts the older requests that
    are not protected, waiting and running. Not counted are protected requests that come back:
    they take no turn from others. Requests with an adapter have turns of their own, for they may
    wait for what nobody else can give them.

    `refuses_late`: requests that never ran are overdue when their deadline is past.
    """

    charges_outputs = False
    allows_bypasses = True
    shares = None

    def __init__(
        self,
        urgency: Callable[[Request], Key],
        *,
        refuses_late: bool,
        lane_of: LaneOf = lane_of_adapter,
    ) -> None:
        self._urgency = urgency
        self._lane_of = lane_of
        self.refuses_late = refuses_late
        # Those that may become overdue are apart, so that any number of them is passed at once.
        self._lasting: OrderedQueue[Request] = OrderedQueue()
        self._expiring: OrderedQueue[Request] = OrderedQueue()
        self._by_deadline: OrderedQueue[Request] = OrderedQueue()
        self._turns = (_Turns(), _Turns())

    def __len__(self) -> int:
        return len(self._lasting) + len(self._expiring)

    def __iter__(self) -> Iterator[Request]:
        if not self._expiring:
            return iter(self._lasting)
        return iter(sorted([*self._lasting, *self._expiring], key=self.rank))

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        pass

    def has_place(self, tenant: str, num_places: int) -> bool:
        return len(self) < num_places

    def push(self, request: Request) -> None:
        deadline_ns = request.scheduling.deadline_ns
        queue = self._lasting
        if self.refuses_late and deadline_ns is not None and expires(request):
            queue = self._expiring
            self._by_deadline.add(request, {"": (deadline_ns, request.arrival)})
        queue.add(request, {self._lane_of(request): self.rank(request)})
        self._turns_of(request).waiting.add(request, {"": (request.arrival,)})

    def remove(self, request: Request) -> None:
        if request in self._expiring:
            self._expiring.remove(request)
            self._by_deadline.remove(request)
        else:
            self._lasting.remove(request)
        self._turns_of(request).waiting.remove(request)

    def change_lane(self, request: Request) -> None:
        queue = self._expiring if request in self._expiring else self._lasting
        queue.change_lane(request, self._lane_of(request))

    def candidates(
        self, now_ns: int = 0, open_lanes: Callable[[], Lanes] = all_lanes
    ) -> Iterator[Request]:
        """Whoever has the turn comes first, whether or not it can run."""
        seen: set[Request] = set()
        key = BEFORE_ALL
        while True:
            lanes = open_lanes()
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
        """First those that have the turn, which others wait for."""
        oldest = [turns.waiting.first() for turns in self._turns]
        for request in (*oldest, self._by_deadline.first()):
            if request is not None and self._is_overdue(request, now_ns):
                return request
        return None

    @property
    def next_deadline_ns(self) -> int | None:
        first = self._by_deadline.first()
        return None if first is None else first.scheduling.deadline_ns

    def ended(self, request_id: str) -> None:
        pass

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Counts, and protects `request` if it has the turn."""
        own = self._turns_of(request)
        for turns in self._turns:
            if turns is not own or request is not own.holder:
                turns.num_since += 1
            elif not request.is_protected:
                request.is_protected = True
                turns.num_since = 0

    def sampled(self, tenant: str, num_tokens: int) -> None:
        pass

    def rank(self, request: Request) -> Key:
        """Protected requests by arrival, then the others by urgency."""
        if request.is_protected:
            return (*_PROTECTED, request.arrival)
        return (1, *self._urgency(request), request.arrival)

    def urgency(self, request: Request) -> Key:
        """Like the rank. Who has the turn is protected as soon as it runs."""
        if request.is_protected or request is self._turns_of(request).holder:
            return _PROTECTED
        return (1, *self._urgency(request))

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether `running` is of a less urgent class and not protected."""
        is_more_urgent = waiting.scheduling.priority < running.scheduling.priority
        return is_more_urgent and not running.is_protected

    def may_pass(self, request: Request, other: Request) -> bool:
        return False

    # -- turns and deadlines -------------------------------------------------------------------

    def _turns_of(self, request: Request) -> _Turns:
        return self._turns[bool(request.scheduling.adapter)]

    def _whose_turn(self, seen: set[Request], now_ns: int, lanes: Lanes) -> Request | None:
        """Who has the turn, has not had its chance yet, and can use it."""
        for turns in self._turns:
            request = turns.holder
            if request is None or request in seen or self._is_overdue(request, now_ns):
                continue
            if lanes is None or self._lane_of(request) in lanes:
                return request
        return None

    def _after(self, key: Key, now_ns: int, lanes: Lanes) -> tuple[Key, Request] | None:
        """The next of those that are not overdue. These are passed class by class."""
        lasting = self._lasting.after(key, lanes)
        expiring = self._expiring.after(key, lanes)
        while expiring is not None and self._is_overdue(expiring[1], now_ns):
            # No key is between this one and those of its class whose deadline is not past.
            expiring = self._expiring.after((*expiring[0][:-2], now_ns), lanes)
        if lasting is None or expiring is None:
            return lasting or expiring
        return min(lasting, expiring, key=lambda entry: entry[0])

    def _is_overdue(self, request: Request, now_ns: int) -> bool:
        deadline_ns = request.scheduling.deadline_ns
        return deadline_ns is not None and deadline_ns < now_ns and request in self._expiring


def by_priority(request: Request) -> Key:
    """A smaller number is more urgent."""
    return (request.scheduling.priority,)


def by_priority_and_deadline(request: Request) -> Key:
    """Of the same priority, who has to be done sooner; last, who has no deadline."""
    deadline_ns = request.scheduling.deadline_ns
    return (request.scheduling.priority, deadline_ns is None, deadline_ns or 0)


class _Turns:
    """Requests that take turns among themselves. `num_since`: admissions since the last turn."""

    def __init__(self) -> None:
        self.waiting: OrderedQueue[Request] = OrderedQueue()
        self.num_since = 0

    @property
    def holder(self) -> Request | None:
        """Whose turn it is, if it is anybody's."""
        return self.waiting.first() if self.num_since >= TURN_EVERY else None


def expires(request: Request) -> bool:
    """Whether a deadline ends a request as long as it waits.

    Not one that has tokens, or may get some from a step in flight.
    """
    has_tokens = any(len(s.token_ids) > s.num_prompt_tokens for s in request.sequences)
    return not (request.is_protected or request.num_preemptions > 0 or has_tokens)
