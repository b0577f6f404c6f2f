"""One queue for all executors: what waits is ordered where all of it is seen.

A host, which is the core of an executor, is given what it can begin soon, and no more: so its turn,
its tenant's share and its deadline are decided against everybody's. A request for which there is
room nowhere, though others could begin, is given to one host that nobody waits at, and waits there
for room; what it passes by meanwhile is bounded by the rules of that core (`planning/admitter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from scheduler_service.core.lack import Lack
from scheduler_service.core.policies.queue_policy import make_queue_policy
from scheduler_service.core.policies.request_queue import Key
from scheduler_service.core.request import Request
from scheduler_service.fleet.fitting_lanes import FittingLanes
from scheduler_service.fleet.hindrances import Hindrances, look_at_heads
from scheduler_service.fleet.holds import Holds
from scheduler_service.fleet.host_state import Host, HostState
from scheduler_service.fleet.hosts import Hosts
from scheduler_service.fleet.moves import to_be_moved
from scheduler_service.fleet.overdue import MAX_OVERDUE, end_overdue
from scheduler_service.fleet.passed import Passed, Waits
from scheduler_service.fleet.prefix_router import PrefixRouter
from scheduler_service.fleet.router import Choice, Router

# What passes by itself, or is for others, is not waited for at a host.
_AWAITED_AT_A_HOST = frozenset({Lack.BLOCKS, Lack.ROWS, Lack.BYTES, Lack.ADAPTER_SLOT})
# How many are judged for one question.
_MAX_JUDGED = 1024
# Of those who wait at hosts so many are taken back in one go, and at each looked at. Few are ever
# given to one that cannot begin them at once.
_MAX_OVERTAKEN = 8


class FleetQueue:
    """The requests that no executor has, in the order of a queue policy."""

    def __init__(
        self, policy: str, tenant_weights: Mapping[str, float], router: Router | None = None
    ) -> None:
        """`policy`: its name. Raises ValueError as `make_queue_policy`."""
        self._lanes = FittingLanes()
        self._policy = make_queue_policy(policy, tenant_weights, self._lanes.name_of)
        self.router: Router = router or PrefixRouter()
        self._hosts = Hosts(self.router)
        self._holds = Holds()
        self._waiting: dict[str, Request] = {}
        # By request, of hosts that lacked blocks for it: how many they had.
        self._lacking: dict[str, dict[HostState, int]] = {}
        # Whether there is more to do at once than was done in one go.
        self._is_behind = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def host_states(self) -> list[HostState]:
        """What was seen last of each host."""
        return list(self._hosts.all)

    def first(self, now_ns: int, limit: int) -> list[Request]:
        """Those whose turn is next, to be looked at."""
        return list(islice(self._policy.candidates(now_ns), limit))

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
        self._lacking.pop(request_id, None)
        self._holds.forget(request_id)
        if request is not None:
            self._policy.remove(request)
        self._lanes.forget(request_id)
        self._policy.ended(request_id)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants other shares; one without a weight has 1."""
        self._policy.weigh_tenants(weights)

    def charge(self, num_sampled: Mapping[str, int]) -> None:
        """Tenants got so many output tokens, from whatever executor."""
        for tenant, num_tokens in num_sampled.items():
            self._policy.sampled(tenant, num_tokens)

    def heads(self, now_ns: int, hosts: Collection[Host]) -> list[tuple[Request, Hindrances]]:
        """The first who wait, and what keeps each of them from `hosts`. Changes nothing."""
        return look_at_heads(self._policy.candidates(now_ns), hosts)

    # -- deadlines -----------------------------------------------------------------------------

    @property
    def refuses_late(self) -> bool:
        """Whether a request ends that waits when its deadline is past."""
        return self._policy.refuses_late

    @property
    def next_look_ns(self) -> int | None:
        """When `take_overdue` or `dispatch` has something to do, if nothing happens before."""
        if self._is_behind:
            return 0
        times = (self._policy.next_deadline_ns, self._holds.next_end_ns)
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def any_fits(self, hosts: Collection[Host]) -> bool:
        """Whether somebody who waits could ever run at one of `hosts`."""
        asked: set[str] = set()
        for request in self._waiting.values():
            lane = self._lanes.name_of(request)
            if self._lanes.is_judged(request, self._hosts.num_kinds) and lane in asked:
                continue  # as the other of its lane
            asked.add(lane)
            if any(host.fits(request) for host in hosts):
                return True
        return False

    def num_unfitting(self, hosts: Collection[Host]) -> int:
        """How many of those who wait fit none of `hosts`, which are all that take requests.

        Of many, those that were looked at by now: some more each time.
        """
        self._hosts.keep(hosts)
        num_kinds, waiting = self._hosts.num_kinds, self._waiting.values()
        unjudged = (r for r in waiting if not self._lanes.is_judged(r, num_kinds))
        for request in islice(unjudged, _MAX_JUDGED):
            self._judge(request)
        return self._lanes.num_fitting_none(set(self._hosts.by_kind))

    def take_overdue(self, now_ns: int) -> Iterator[Request]:
        """Some of those whose deadline is past, ended; to be told and forgotten by the caller."""
        for _ in range(MAX_OVERDUE):
            request = self._policy.overdue(now_ns)
            if request is None:
                return
            yield end_overdue(request, now_ns)

    # -- who goes where ------------------------------------------------------------------------

    def note(self, host: Host) -> None:
        """Something has changed at a host while nobody waited."""
        self._hosts.note(host)

    def dispatch(
        self,
        now_ns: int,
        hosts: Collection[Host],
        changed: Collection[Host] | None = None,
        take_back: Callable[[Host, str], None] | None = None,
    ) -> Iterator[tuple[Request, Host]]:
        """Requests, and the hosts that get them, in order.

        The caller gives each to its host before it asks for the next. `hosts`: all that take
        requests. `changed`: where something has changed since the last time, or was noted; None for
        everywhere. `take_back`: has a request pushed that waits at a host, by its id.
        """
        self._hosts.keep(hosts)
        for host in hosts if changed is None else changed:
            self._hosts.note(host)
        self._holds.end(now_ns)
        if not self._waiting:
            self._is_behind = False
            return
        self._hosts.look()
        if take_back is not None:
            self._take_back_overtaken(now_ns, take_back)
        if changed and not (self._holds or any(self._may_take(h, now_ns) for h in changed)):
            return
        passed, allows_bypasses = Passed(), self._policy.allows_bypasses
        self._is_behind = False
        open_lanes = partial(self._lanes.all_but, passed.closed_lanes)
        for request in self._policy.candidates(now_ns, open_lanes):
            if passed.held and not self._may_pass(request, passed.held):
                return
            state = self._choose(request, now_ns)
            if isinstance(state, Waits):
                self._pass(request, state, passed)
                if not self._hosts.has_open or passed.is_end(allows_bypasses=allows_bypasses):
                    self._is_behind = passed.is_cut_short
                    return
                continue
            for each in passed.blocked:
                each.num_bypasses += 1
            self._holds.passed(passed.held)
            yield self._take(request, state), state.host
            self._hosts.look_at(state)

    def _take_back_overtaken(self, now_ns: int, take_back: Callable[[Host, str], None]) -> None:
        """Whoever waits at a host, and could begin at another before all who wait here, does."""
        for _ in range(_MAX_OVERTAKEN):
            found = self._overtaken(now_ns)
            if found is None:
                return
            take_back(*found)
            self._hosts.note(found[0])
            self._hosts.look()

    def _overtaken(self, now_ns: int) -> tuple[Host, str] | None:
        """One of them: the host, and its id.

        Under a policy with shares nobody is: whose turn it is depends on what tenants got since.
        """
        waited_at = [state.host for state in self._hosts.all if state.is_waited_at]
        if not waited_at or self._policy.shares is not None:
            return None
        first = next(self._policy.candidates(now_ns), None)
        if first is None:
            return None
        before = self._place(first)
        for state in self._hosts.all:
            found = state.is_open and to_be_moved(
                now_ns,
                state.host,
                waited_at,
                lambda request: self._place(request) < before,
                _MAX_OVERTAKEN,
            )
            if found:
                return found
        return None

    def _place(self, request: Request) -> tuple[Key, Key]:
        """Smaller goes first."""
        return self._policy.urgency(request), self._policy.rank(request)

    def _pass(self, request: Request, waits: Waits, passed: Passed) -> None:
        if waits is not Waits.FOR_ONE_THAT_IT_FITS:
            passed.add(request, waits)
            return
        passed.num_judged += self._judge(request)
        passed.add_misfit(self._lanes.name_of(request))

    def _judge(self, request: Request) -> bool:
        """Puts a request into the lane of those that fit the same hosts; False: it is there."""
        num_kinds = self._hosts.num_kinds
        if self._lanes.is_judged(request, num_kinds):
            return False
        self._lanes.judge(request, self._hosts.by_kind, num_kinds)
        self._policy.change_lane(request)
        return True

    def _take(self, request: Request, state: HostState) -> Request:
        num_known = len(request.unfinished[0].token_ids) if request.unfinished else 0
        num_cached = state.host.num_cached_tokens(request)
        self._policy.admitted(request, max(0, num_known - num_cached))
        self._policy.remove(request)
        self._holds.forget(request.request_id)
        self._lanes.forget(request.request_id)
        self._lacking.pop(request.request_id, None)
        del self._waiting[request.request_id]
        self.router.given(state, request)
        return request

    def _may_take(self, host: Host, now_ns: int) -> bool:
        state = self._hosts.state_of(host)
        if state is None or state.is_open:
            return state is not None
        first = next(self._policy.candidates(now_ns), None)
        return first is not None and host.openings.may_yield_to(first)

    def _may_pass(self, request: Request, held: Sequence[Request]) -> bool:
        """Whether a request may begin before those that wait for a busy host, though they could."""
        is_as_urgent = self._policy.urgency(request) == self._policy.urgency(held[0])
        return is_as_urgent and self._holds.may_be_passed(held)

    def _choose(self, request: Request, now_ns: int) -> HostState | Waits:
        """Who gets a request now, or why it waits."""
        states = self._fitting(request)
        open_states = [state for state in states if state.is_open]
        if not open_states:
            return self._where_others_yield(request) or Waits.FOR_ONE_THAT_IT_FITS
        found: HostState | Waits | None = None
        if any(self._is_hopeful(request, state) for state in open_states):
            found = self._best(request, states, now_ns)
        return found or self._where_others_yield(request) or self._awaited(request, open_states)

    def _fitting(self, request: Request) -> list[HostState]:
        states = self._hosts.worth_a_look
        hosts = {state.kind: state.host for state in states}
        kinds = {kind for kind, host in hosts.items() if host.fits(request)}
        return [state for state in states if state.kind in kinds]

    def _is_hopeful(self, request: Request, state: HostState) -> bool:
        """Whether it is worth asking a host that may have lacked blocks for a request."""
        num_blocks = self._lacking.get(request.request_id, {}).get(state)
        return num_blocks is None or state.num_blocks_left > num_blocks or state.is_idle

    def _best(
        self, request: Request, states: Sequence[HostState], now_ns: int
    ) -> HostState | Waits | None:
        """Where a request begins now, or for whom it had better wait."""
        better: Choice | None = None
        for choice in self.router.rank(request, states):
            state = choice.state
            if not state.is_open:
                better = better or choice
                continue
            lack = state.host.openings.what_lacks(request)
            if lack is None:
                if better and self._holds.begins(request, choice.cost_ns, better.cost_ns, now_ns):
                    return Waits.FOR_ONE_THAT_IS_BUSY
                return state
            lacking = self._lacking.setdefault(request.request_id, {})
            if lack is Lack.BLOCKS:
                lacking[state] = state.num_blocks_left
            else:
                lacking.pop(state, None)
        return None

    def _awaited(self, request: Request, states: Sequence[HostState]) -> HostState | Waits:
        """A host where a request waits for what it lacks, with nobody before it."""
        free = [state for state in states if state.host.openings.nobody_waits]
        for state, _ in self.router.rank(request, free):
            if state.host.openings.what_lacks(request) in _AWAITED_AT_A_HOST:
                return state
        return Waits.FOR_ROOM

    def _where_others_yield(self, request: Request) -> HostState | None:
        yielding = [s for s in self._hosts.all if s.host.openings.may_yield_to(request)]
        for state, _ in self.router.rank(request, yielding):
            if state.host.fits(request):
                state.host.openings.yields_to(request)
                return state
        return None
