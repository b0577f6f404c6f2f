"""One queue for all executors: what waits is ordered where all of it is seen.

A host, which is the core of an executor, is given what it can begin soon, and no more: so its turn,
its tenant's share and its deadline are decided against everybody's. A request for which there is
room nowhere, though others could begin, is given to one host that nobody waits at, and waits there
for room; what it passes by meanwhile is bounded by the rules of that core (`planning/admitter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from scheduler_service.assignment import Assignment
from scheduler_service.core.queue.lanes import OpenLanes
from scheduler_service.core.queue.ordered_queue import Key
from scheduler_service.core.queue.queue_policy import make_queue_policy
from scheduler_service.core.queue.waiting_queue import WaitingQueue
from scheduler_service.core.request import Request
from scheduler_service.fleet.choosing import Choosing, Place
from scheduler_service.fleet.fitting_lanes import FittingLanes
from scheduler_service.fleet.hindrances import Hindrances, look_at_heads
from scheduler_service.fleet.holds import Holds
from scheduler_service.fleet.host_state import Host, HostState
from scheduler_service.fleet.hosts import Hosts
from scheduler_service.fleet.moves import has_waited, to_be_moved
from scheduler_service.fleet.overdue import MAX_OVERDUE, end_overdue
from scheduler_service.fleet.passed import Passed, Waits
from scheduler_service.fleet.prefix_router import PrefixRouter
from scheduler_service.fleet.router import Router

# How many are judged for one question.
_MAX_JUDGED = 1024
# Of those who wait at hosts so many are taken back in one go, and at each looked at. Few are ever
# given to one that cannot begin them at once.
_MAX_OVERTAKEN = 8
# For one request that is given, so many hosts where others wait are looked at, and so many that
# could begin them. Other requests are given soon, and then it is the turn of other hosts.
_MAX_PAIRED = 8


class Given(NamedTuple):
    """A request goes to a host."""

    request: Request
    host: Host
    assignment: Assignment


class FleetQueue:
    """The requests that no executor has, in the order of a queue policy."""

    def __init__(
        self, policy: str, tenant_weights: Mapping[str, float], router: Router | None = None
    ) -> None:
        """`policy`: its name. Raises ValueError as `make_queue_policy`."""
        self._lanes = FittingLanes()
        self._queue = WaitingQueue(make_queue_policy(policy, tenant_weights))
        self.router: Router = router or PrefixRouter()
        self._hosts = Hosts(self.router)
        self._holds = Holds()
        self._choosing = Choosing(self._hosts, self._holds, self.router, self._queue.shares)
        self._num_looks = 0
        # Whether there is more to do at once than was done in one go.
        self._is_behind = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def host_states(self) -> list[HostState]:
        """What was seen last of each host."""
        return list(self._hosts.all)

    def first(self, now_ns: int, limit: int) -> list[Request]:
        """Those whose turn is next, to be looked at."""
        self._queue.tick(now_ns)
        return list(islice(self._queue.candidates(), limit))

    def has_place(self, request: Request, num_places: int) -> bool:
        """Whether the queue, if it has so many places, takes `request`, a new one."""
        return self._queue.has_place(request.scheduling.tenant, num_places)

    def push(self, request: Request) -> None:
        """Takes a request that is new, or comes back from an executor with its old arrival."""
        self._queue.push(request, self._lanes.name_of(request))

    def forget(self, request_id: str) -> None:
        """A request has ended, wherever it was."""
        self._choosing.forget(request_id)
        self._queue.ended(request_id)
        self._lanes.forget(request_id)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants other shares; one without a weight has 1."""
        self._queue.weigh_tenants(weights)

    def charge(self, num_sampled: Mapping[str, int]) -> None:
        """Tenants got so many output tokens, from whatever executor."""
        self._queue.charge(num_sampled)

    def heads(self, now_ns: int, hosts: Collection[Host]) -> list[tuple[Request, Hindrances]]:
        """The first who wait, and what keeps each of them from `hosts`. Changes nothing."""
        self._queue.tick(now_ns)
        return look_at_heads(self._queue.candidates(), hosts, self._holds.is_held)

    # -- deadlines -----------------------------------------------------------------------------

    @property
    def refuses_late(self) -> bool:
        """Whether a request ends that waits when its deadline is past."""
        return self._queue.refuses_late

    @property
    def next_look_ns(self) -> int | None:
        """When `take_overdue` or `dispatch` has something to do, if nothing happens before."""
        if self._is_behind:
            return 0
        times = (self._queue.next_deadline_ns, self._holds.next_end_ns)
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def any_fits(self, hosts: Collection[Host]) -> bool:
        """Whether somebody who waits could ever run at one of `hosts`."""
        asked: set[str] = set()
        for request in self._queue:
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
        num_kinds = self._hosts.num_kinds
        unjudged = (r for r in self._queue if not self._lanes.is_judged(r, num_kinds))
        for request in list(islice(unjudged, _MAX_JUDGED)):
            self._judge(request)
        return self._lanes.num_fitting_none(set(self._hosts.by_kind))

    def take_overdue(self, now_ns: int) -> Iterator[Request]:
        """Some of those whose deadline is past, ended; to be told and forgotten by the caller."""
        self._queue.tick(now_ns)
        for _ in range(MAX_OVERDUE):
            request = self._queue.overdue()
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
    ) -> Iterator[Given]:
        """Requests, and the hosts that get them, in order.

        The caller gives each to its host before it asks for the next. `hosts`: all that take
        requests. `changed`: where something has changed since the last time, or was noted; None for
        everywhere. `take_back`: has a request pushed that waits at a host, by its id.
        """
        self._hosts.keep(hosts)
        for host in hosts if changed is None else changed:
            self._hosts.note(host)
        self._choosing.tick(now_ns)
        self._queue.tick(now_ns)
        if not len(self._queue):
            self._is_behind = False
            return
        self._hosts.look()
        if take_back is not None:
            self._take_back_overtaken(now_ns, take_back)
        if changed and not (self._holds or any(self._may_take(h, now_ns) for h in changed)):
            return
        passed, allows_bypasses = Passed(), self._queue.allows_bypasses
        self._is_behind = False
        open_lanes = OpenLanes()
        for request in self._queue.candidates(open_lanes):
            if passed.held and not self._may_pass(request, passed.held):
                return
            place = self._choosing.choose(request, now_ns)
            if isinstance(place, Waits):
                self._pass(request, place, passed)
                open_lanes.groups = self._lanes.all_but(passed.closed_lanes)
                if not self._hosts.has_open or passed.is_end(allows_bypasses=allows_bypasses):
                    self._is_behind = passed.is_cut_short
                    return
                continue
            for each in passed.blocked:
                each.num_bypasses += 1
            self._holds.passed(passed.held)
            yield self._take(request, place)
            self._hosts.look_at(place.choice.state)

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
        if self._queue.shares is not None:
            return None
        takers = [state.host for state in self._hosts.all if state.is_open]
        if not takers:
            return None
        states = [state for state in self._hosts.all if state.is_waited_at]
        givers = [state.host for state in states if has_waited(state.host, now_ns)]
        first = next(self._queue.candidates(), None) if givers else None
        if first is None:
            return None
        before = self._place(first)
        self._num_looks += 1
        some_givers = self._some(givers)
        for taker in self._some(takers):
            found = to_be_moved(
                now_ns,
                taker,
                some_givers,
                lambda request: self._place(request) < before,
                _MAX_OVERTAKEN,
            )
            if found:
                return found
        return None

    def _some(self, hosts: Sequence[Host]) -> Sequence[Host]:
        """As many of these as are looked at together, other ones each time."""
        first = self._num_looks * _MAX_PAIRED % len(hosts) if len(hosts) > _MAX_PAIRED else 0
        return [*hosts[first:], *hosts[:first]][:_MAX_PAIRED]

    def _place(self, request: Request) -> tuple[Key, Key]:
        """Smaller goes first."""
        return self._queue.step_class(request), self._queue.rank(request)

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
        self._queue.set_group(request, self._lanes.name_of(request))
        return True

    def _take(self, request: Request, place: Place) -> Given:
        state = place.choice.state
        num_known = len(request.unfinished[0].token_ids) if request.unfinished else 0
        num_cached = state.host.num_cached_tokens(request)
        self._queue.begun(request, max(0, num_known - num_cached))
        self._choosing.forget(request.request_id)
        self._lanes.forget(request.request_id)
        given = Given(request, state.host, place.assignment(num_cached))
        self.router.given(state, request)
        return given

    def _may_take(self, host: Host, now_ns: int) -> bool:
        state = self._hosts.state_of(host)
        if state is None or state.is_open:
            return state is not None
        first = next(self._queue.candidates(), None)
        return first is not None and host.openings.may_yield_to(first)

    def _may_pass(self, request: Request, held: Sequence[Request]) -> bool:
        """Whether a request may begin before those that wait for a busy host, though they could."""
        is_as_urgent = self._queue.step_class(request) == self._queue.step_class(held[0])
        return is_as_urgent and self._holds.may_be_passed(held)
