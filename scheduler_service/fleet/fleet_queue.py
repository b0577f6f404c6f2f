"""One queue for all executors: what waits is ordered where all of it is seen.

A host, which is the core of an executor, is given what it can begin soon, and no more: so its turn,
its tenant's share and its deadline are decided against everybody's. A request for which there is
room nowhere, though others could begin, is given to one host that nobody waits at, and waits there
for room; what it passes by meanwhile is bounded by the rules of that core (`planning/admitter.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from scheduler_service.core.planning.room import Lack
from scheduler_service.core.policies.queue_policy import make_queue_policy
from scheduler_service.core.request import Request
from scheduler_service.fleet.router import Host, LeastLoaded, Router

# How many that can begin nowhere are passed in one go; bounds the work.
_MAX_BLOCKED = 16
# How many are ended in one go.
_MAX_OVERDUE = 32
# So long anybody waits at a host before another takes it.
_LEAST_PATIENCE_NS = 10_000_000
# What passes by itself, or is for others, is not waited for at a host.
_AWAITED_AT_A_HOST = frozenset({Lack.BLOCKS, Lack.ROWS, Lack.BYTES, Lack.ADAPTER_SLOT})


class FleetQueue:
    """The requests that no executor has, in the order of a queue policy."""

    def __init__(
        self, policy: str, tenant_weights: Mapping[str, float], router: Router | None = None
    ) -> None:
        """`policy`: its name. Raises ValueError as `make_queue_policy`."""
        self._policy = make_queue_policy(policy, tenant_weights)
        self._router = router or LeastLoaded()
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def has_place(self, request: Request, num_places: int) -> bool:
        """Whether the queue, if it has so many places, takes `request`, a new one."""
        return self._policy.has_place(request.scheduling.tenant, num_places)

    def push(self, request: Request) -> None:
        """Takes a request that is new, or comes back from an executor with its old arrival."""
        self._waiting[request.request_id] = request
        self._policy.push(request)

    def forget(self, request_id: str) -> None:
        """A request has ended, wherever it was."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._policy.remove(request)
        self._policy.ended(request_id)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants other shares; one without a weight has 1."""
        self._policy.weigh_tenants(weights)

    def charge(self, num_sampled: Mapping[str, int]) -> None:
        """Tenants got so many output tokens, from whatever executor."""
        for tenant, num_tokens in num_sampled.items():
            self._policy.sampled(tenant, num_tokens)

    # -- deadlines -----------------------------------------------------------------------------

    @property
    def next_deadline_ns(self) -> int | None:
        """When `take_overdue` has something to end; None: not before something is pushed."""
        return self._policy.next_deadline_ns

    def take_overdue(self, now_ns: int) -> Iterator[Request]:
        """Some of those whose deadline is past, ended; to be told and forgotten by the caller."""
        for _ in range(_MAX_OVERDUE):
            request = self._policy.overdue(now_ns)
            if request is None:
                return
            late_s = (now_ns - (request.scheduling.deadline_ns or 0)) / 1e9
            message = f"it waited for an executor until {late_s:.3f} s after its deadline"
            request.fail_unscheduled("DEADLINE_UNREACHABLE", message)
            yield request

    # -- who goes where ------------------------------------------------------------------------

    def dispatch(
        self, now_ns: int, hosts: Sequence[Host], changed: Host | None = None
    ) -> Iterator[tuple[Request, Host]]:
        """Requests, and the hosts that get them, in order.

        The caller gives each to its host before it asks for the next. `changed`: nothing has
        changed since the last time but there.
        """
        if not self._waiting or (changed is not None and not self._may_take(changed, now_ns)):
            return
        openings = [host for host in hosts if host.openings.is_open]
        blocked: list[Request] = []
        for request in self._policy.candidates(now_ns):
            host = self._host_for(request, openings, hosts)
            if host is None:
                blocked.append(request)
                is_end = not openings or not self._policy.allows_bypasses
                if is_end or len(blocked) == _MAX_BLOCKED:
                    return
                continue
            num_known = len(request.unfinished[0].token_ids) if request.unfinished else 0
            self._policy.admitted(request, max(0, num_known - host.num_cached_tokens(request)))
            self._policy.remove(request)
            del self._waiting[request.request_id]
            for passed in blocked:
                passed.num_bypasses += 1
            yield request, host
            if host in openings and not host.openings.is_open:
                openings.remove(host)

    def to_be_moved(
        self, now_ns: int, taker: Host, others: Iterable[Host]
    ) -> tuple[Host, str] | None:
        """Who waits at one of `others` and had better begin at `taker`: the host, and its id.

        Nobody as long as there are requests that nobody has. Who has KV somewhere waits for its
        turn there for as long as it would take to compute it again: so it loses at most twice
        what whoever knew the future would (ski rental).
        """
        if self._waiting or not taker.openings.is_open:
            return None
        for host in others:
            if host is taker or host.openings.nobody_waits:
                continue
            for request in host.openings.movable:
                num_tokens = sum(len(sequence.token_ids) for sequence in request.unfinished)
                patience_ns = max(_LEAST_PATIENCE_NS, taker.recompute_ns(num_tokens))
                has_waited = now_ns - request.queued_at_ns >= patience_ns
                if has_waited and taker.fits(request) and _can_begin(request, taker):
                    return host, request.request_id
        return None

    def _may_take(self, host: Host, now_ns: int) -> bool:
        if host.openings.is_open:
            return True
        first = next(self._policy.candidates(now_ns), None)
        return first is not None and host.openings.may_yield_to(first)

    def _host_for(
        self, request: Request, openings: Sequence[Host], hosts: Iterable[Host]
    ) -> Host | None:
        lacks = {host: host.openings.what_lacks(request) for host in openings if host.fits(request)}
        host = self._router.choose(request, (h for h, lack in lacks.items() if lack is None))
        if host is not None:
            return host
        yielding = (h for h in hosts if h.openings.may_yield_to(request) and h.fits(request))
        host = self._router.choose(request, yielding)
        if host is not None:
            host.openings.yields_to(request)
            return host
        awaited = (
            h for h, lack in lacks.items() if lack in _AWAITED_AT_A_HOST and h.openings.nobody_waits
        )
        return self._router.choose(request, awaited)


def _can_begin(request: Request, host: Host) -> bool:
    return host.openings.what_lacks(request) is None
