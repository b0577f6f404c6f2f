"""Who is next: the waiting requests and the order of all requests.

A policy orders and picks; it knows nothing of blocks, rows or steps. One core has one policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Protocol, assert_never

from scheduler_service.core.fair_share import FairSharePolicy
from scheduler_service.core.request import Request
from scheduler_service.core.request_queue import BEFORE_ALL, Key, OrderedQueue

TURN_EVERY = 8


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

    def candidates(self) -> Iterator[Request]:
        """Waiting requests in the order in which they should be admitted now, each at most once.

        Lazy: between two of them the caller may admit and remove the last one and push others,
        and the order then reflects it. What is pushed meanwhile may be left to the next iterator.
        """

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Takes note that `request`, which waits here, runs now; the caller then removes it.

        `num_uncached_tokens`: those of its tokens that have to be computed. May set
        `request.is_protected`.
        """

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Takes note of `num_tokens` output tokens of requests of `tenant`."""

    def rank(self, request: Request) -> Key:
        """Smaller is more urgent, unique; changes only when the request is admitted."""

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
        self._waiting.add(request, self.rank(request))

    def remove(self, request: Request) -> None:
        """See `QueuePolicy`."""
        self._waiting.remove(request)

    def candidates(self) -> Iterator[Request]:
        """See `QueuePolicy`."""
        key = BEFORE_ALL
        while (entry := self._waiting.after(key)) is not None:
            key, request = entry
            yield request

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Does not matter here."""

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Does not matter here."""

    def rank(self, request: Request) -> Key:
        """The arrival."""
        return (request.arrival,)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Never."""
        return False


class UrgencyPolicy:
    """The most urgent first, but nobody starves: requests take turns.

    After TURN_EVERY admissions by urgency it is the turn of the request that has waited longest. It
    becomes *protected*: it goes before all that are not, in the order of arrival, and nobody who
    waits may preempt it. So a request that waits has its turn, or is admitted before, within
    (TURN_EVERY + 1) * (m + 1) admissions, whatever arrives later; m counts the older requests that
    are not protected, waiting and running. Not counted are protected requests that come back:
    they take no turn from others.
    """

    charges_outputs = False

    def __init__(self, urgency: Callable[[Request], Key]) -> None:
        self._urgency = urgency
        self._by_rank: OrderedQueue[Request] = OrderedQueue()
        self._by_arrival: OrderedQueue[Request] = OrderedQueue()
        self._num_since_turn = 0

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_rank)

    def push(self, request: Request) -> None:
        """See `QueuePolicy`."""
        self._by_rank.add(request, self.rank(request))
        self._by_arrival.add(request, (request.arrival,))

    def remove(self, request: Request) -> None:
        """See `QueuePolicy`."""
        self._by_rank.remove(request)
        self._by_arrival.remove(request)

    def candidates(self) -> Iterator[Request]:
        """See `QueuePolicy`. Whoever has the turn comes first, whether or not it can run."""
        seen: set[Request] = set()
        key = BEFORE_ALL
        while True:
            request = self._whose_turn()
            if request is None or request in seen:
                entry = self._by_rank.after(key)
                if entry is None:
                    return
                key, request = entry
            if request not in seen:
                seen.add(request)
                yield request

    def admitted(self, request: Request, num_uncached_tokens: int) -> None:
        """Counts, and protects `request` if it has the turn."""
        if request is not self._whose_turn():
            self._num_since_turn += 1
        elif not request.is_protected:
            request.is_protected = True
            self._num_since_turn = 0

    def sampled(self, tenant: str, num_tokens: int) -> None:
        """Does not matter here."""

    def rank(self, request: Request) -> Key:
        """Protected requests by arrival, then the others by urgency."""
        if request.is_protected:
            return (0, request.arrival)
        return (1, *self._urgency(request), request.arrival)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether `running` is of a less urgent class and not protected."""
        is_more_urgent = waiting.scheduling.priority < running.scheduling.priority
        return is_more_urgent and not running.is_protected

    def _whose_turn(self) -> Request | None:
        return self._by_arrival.first() if self._num_since_turn >= TURN_EVERY else None


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
            return UrgencyPolicy(_priority)
        case QueuePolicyName.FAIR:
            return FairSharePolicy(tenant_weights)
        case QueuePolicyName.DEADLINE:
            return UrgencyPolicy(_priority_and_deadline)
        case never:
            assert_never(never)


def earliest_finish_ns(
    request: Request,
    now_ns: int,
    step_ns: int,
    num_uncached_prompt_tokens: int,
    tokens_per_step: int,
) -> int:
    """When the last token of `request`, which waits, could be there if it were admitted now.

    A lower bound if a step takes at least `step_ns`, computes at most `tokens_per_step` tokens and
    samples at most one of each sequence.
    """
    params = request.params
    least = max(params.min_tokens, 1)
    if params.max_tokens is not None and params.ignore_eos and not params.stop_token_ids:
        least = params.max_tokens
    if request.stop_len:
        least = min(least, request.stop_len - request.sequence.num_prompt_tokens)
    num_known = min(s.num_output_tokens + s.num_promised for s in request.unfinished)
    num_decode_steps = max(least - num_known, 1) - 1
    num_prefill_steps = max(-(-num_uncached_prompt_tokens // tokens_per_step), 1)
    return now_ns + (num_prefill_steps + num_decode_steps) * step_ns


def _priority(request: Request) -> Key:
    return (request.scheduling.priority,)


def _priority_and_deadline(request: Request) -> Key:
    deadline_ns = request.scheduling.deadline_ns
    return (request.scheduling.priority, deadline_ns is None, deadline_ns or 0)
