"""Routing: at which executor a waiting request begins, and for which executor it waits.

A request waits in the queue, and nowhere else. When an executor is about to plan a step, its view
of the queue (`EngineQueue`) has the requests that should begin there rather than elsewhere. An idle
executor plans a step only if `choose` assigned a request to it. A request for which no executor has
room holds a reservation for one of them. Other requests pass it there a bounded number of times,
and then wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count
from typing import NamedTuple

from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.engine.planning import fits
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.queue import OpenLanes, WaitingQueue
from scheduler_service.scheduler.routing.prefix_index import Prefixes
from scheduler_service.scheduler.routing.router import (
    ASSUMED_TOKEN_NS,
    Choice,
    HostState,
    Router,
    are_alike,
)
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    AssignedFor,
    Assignment,
    Request,
    RequestStatus,
    SchedulerConfig,
)

# Most requests that may begin before one that waits for a busy executor.
MAX_PASSED = 8
# Most requests waiting for busy executors that a pass through the queue skips before it ends.
_MAX_HELD = 16
# Least saving by waiting for a busy executor, as a ratio of the cost of beginning at once.
_LEAST_SAVED_RATIO = 0.2
_US_NS = 1000


class RoutingBlocker(Enum):
    """Reasons why a request does not begin at an executor, besides missing rows and blocks.

    UNFIT: the request could never run there. OTHERS_WAIT_THERE: the request waits for room at
    another executor. NONE: the request could begin, and will. BETTER_IS_BUSY: the request could
    begin, but waits for another executor where it has less to compute.
    """

    UNFIT = "does_not_fit"
    OTHERS_WAIT_THERE = "others_wait_there"
    NONE = "about_to_begin"
    BETTER_IS_BUSY = "awaits_better"


@dataclass(slots=True)
class _Hold:
    """Hold of a request that waits for `executor`, which is busy, until `until_ns` at most.

    `prefixes`: cached prefixes of the request when executors were compared last. `num_passed`:
    requests that began before this one meanwhile.
    """

    executor: ExecutorState
    until_ns: int
    prefixes: Prefixes
    num_passed: int = 0
    is_over: bool = False

    def end(self, now_ns: int) -> None:
        """Ends the hold if the request has waited long enough or was passed often enough."""
        self.is_over |= now_ns >= self.until_ns or self.num_passed >= MAX_PASSED


class _Before(NamedTuple):
    """Load of an engine before a request begins.

    `num_running`: sequences with a row; `num_pending_tokens`: prompt tokens to compute;
    `num_preempted`: preempted requests.
    """

    num_running: int
    num_pending_tokens: int
    num_preempted: int

    @classmethod
    def of(cls, engine: Engine) -> _Before:
        """Reads the load."""
        return cls(engine.num_running, engine.num_pending_tokens, engine.num_preempted)


@dataclass(slots=True)
class _Walk:
    """State of a pass through the queue, for an `executor` that plans, or for all idle ones.

    `held`: requests that wait for busy executors. `num_passes_left`: how many requests may still
    begin before all of these.
    """

    executor: ExecutorState | None = None
    held: list[Request] = field(default_factory=list)
    num_passes_left: int = MAX_PASSED

    def wait(self, request: Request, hold: _Hold) -> None:
        """Adds a request that waits for a busy executor."""
        self.held.append(request)
        self.num_passes_left = min(self.num_passes_left, MAX_PASSED - hold.num_passed)


class Routing:
    """Comparison of executors for waiting requests, with their holds and reservations.

    `closed_to`: returns the executor lives on which a request must not begin; it waits for another
    executor instead. `looked_at`: the last request that the latest view of the queue reached.
    `is_stale`: whether a request that could not begin at an idle executor when `choose` was called
    last may begin now.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        router: Router,
        closed_to: Callable[[Request], Collection[Hashable]],
    ) -> None:
        self._queue = queue
        self._router = router
        self._closed_to = closed_to
        self.looked_at: Request | None = None
        self.is_stale = self._was_stale = False
        self._states: dict[ExecutorState, HostState] = {}
        # Executors whose state has changed since it was read.
        self._changed: dict[ExecutorState, None] = {}
        # Configurations of all executors ever known; the index is the kind of the executor.
        self._kinds: list[SchedulerConfig] = []
        # Kinds of executors that the requests of a group fit, by the name of the group.
        self._groups: dict[str, frozenset[int]] = {}
        self._holds: dict[str, _Hold] = {}
        self._by_number: dict[int, ExecutorState] = {}
        # Requests assigned to executors that plan a step in this turn, by request id.
        self._assigned: dict[str, ExecutorState] = {}
        # Executors that plan a step in this turn, or will if a request is assigned to them.
        self._planning: dict[ExecutorState, None] = {}
        # Executors that did not begin a request assigned to them in this turn, by request id.
        self._declined: dict[str, set[ExecutorState]] = {}
        # Reservations: executor by id of the large request that waits for it, and the reverse.
        self._reserved: dict[str, ExecutorState] = {}
        self._reserving: dict[ExecutorState, str] = {}
        self._reasons: dict[str, tuple[AssignedFor, Choice | None, Choice | None]] = {}
        # Load of the executor at which a request began, before it began, by request id.
        self._before: dict[str, _Before] = {}

    # -- executors -----------------------------------------------------------------------------

    def keep(self, executors: Sequence[ExecutorState]) -> None:
        """Sets the executors that take requests. Ends reservations at all other executors."""
        if len(executors) == len(self._states) and all(e in self._states for e in executors):
            return
        for executor in [known for known in self._states if known not in executors]:
            state = self._states.pop(executor)
            del self._by_number[state.number]
            self._router.remove(state)
            self._changed.pop(executor, None)
            self._release(executor)
        for executor in executors:
            if executor not in self._states:
                number = next(n for n in count() if n not in self._by_number)
                self._by_number[number] = executor
                state = HostState(executor.engine, number, self._kind_of(executor))
                self._states[executor] = state
                self._router.add(state)
                self._changed[executor] = None
        self.is_stale = True

    def _kind_of(self, executor: ExecutorState) -> int:
        """Returns the kind of an executor; a new number for a new configuration."""
        if executor.config in self._kinds:
            return self._kinds.index(executor.config)
        self._kinds.append(executor.config)
        for request in list(self._queue):
            self._queue.set_group(request, self.group_of(request))
        self._forget_groups()
        return len(self._kinds) - 1

    def _forget_groups(self) -> None:
        """Forgets groups without a waiting request."""
        used = {self.group_of(request) for request in self._queue}
        self._groups = {name: kinds for name, kinds in self._groups.items() if name in used}

    def _release(self, executor: ExecutorState) -> None:
        request_id = self._reserving.pop(executor, None)
        if request_id is not None:
            del self._reserved[request_id]
        assigned = [name for name, other in self._assigned.items() if other is executor]
        for name in assigned:
            del self._assigned[name]
        self._planning.pop(executor, None)

    def changed(self, executor: ExecutorState) -> None:
        """Notes that rows, blocks or requests of an executor have changed."""
        if executor in self._states:
            self._changed[executor] = None

    def begin_turn(self, executors: Sequence[ExecutorState], idle: Iterable[ExecutorState]) -> None:
        """Begins a turn with the executors that take requests, and `idle` ones that may plan."""
        self.keep(executors)
        self._declined.clear()
        self._assigned.clear()
        self._planning = dict.fromkeys(idle)
        # Changes of this turn may concern executors that planned before the change.
        self._was_stale, self.is_stale = self.is_stale, False

    def planned(self, executor: ExecutorState) -> None:
        """Notes that an executor has planned. It declined assigned requests that still wait."""
        self._planning.pop(executor, None)
        self.changed(executor)
        left = [name for name, other in self._assigned.items() if other is executor]
        for name in left:
            del self._assigned[name]
            self._declined.setdefault(name, set()).add(executor)

    def choose(self, idle: Collection[ExecutorState]) -> list[ExecutorState]:
        """Returns the executors of `idle` that are to plan, since requests are assigned to them.

        Without assignments, first assigns the first waiting request that can begin at an executor
        that has not planned in this turn; else one that was assigned and did not begin.
        """
        if not self._assigned and len(self._queue) and (self.is_stale or self._was_stale):
            if len(self._states) == 1:
                return [each for each in self._planning if each in self._states]
            self._look()
            self._choose_first()
            if not self._assigned:
                self._choose_again(idle)
        return list(dict.fromkeys(self._assigned.values()))

    def _choose_first(self) -> None:
        """Assigns the first waiting request that can begin at an executor of `_planning`."""
        walk = _Walk()
        for request in self._fitting([each for each in self._planning if self.has_room(each)]):
            if walk.held and not self._may_pass(request, walk):
                return
            if self._assign_best(request, walk) is not None:
                return

    def _choose_again(self, idle: Collection[ExecutorState]) -> None:
        """Assigns a declined request to an executor that has planned earlier in this turn."""
        for request_id, declined in self._declined.items():
            request = self._queue.get(request_id)
            if request is None:
                continue
            self._planning = dict.fromkeys(each for each in idle if each not in declined)
            if self._assign_best(request, _Walk()) is not None:
                return

    def has_room(self, executor: ExecutorState) -> bool:
        """Returns whether an executor has a row, blocks and tokens for a request now."""
        self._look()
        state = self._states.get(executor)
        return state is not None and state.is_open

    # -- requests ------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """Adds a request to the waiting queue, in its group."""
        self._queue.push(request, self.group_of(request))
        self.is_stale = True

    def forget(self, request_id: str) -> None:
        """Forgets a request that has begun or ended."""
        self._holds.pop(request_id, None)
        self._assigned.pop(request_id, None)
        self._reasons.pop(request_id, None)
        self._before.pop(request_id, None)
        executor = self._reserved.pop(request_id, None)
        if executor is not None:
            del self._reserving[executor]

    def group_of(self, request: Request) -> str:
        """Returns the name of the group of requests that fit the same kinds of executors."""
        kinds = frozenset(n for n, config in enumerate(self._kinds) if fits(request, config))
        name = ",".join(map(str, sorted(kinds)))
        self._groups[name] = kinds
        return name

    def num_unfitting(self, executors: Sequence[ExecutorState]) -> int:
        """Returns the number of queued requests that none of these executors could ever run.

        Changes nothing: metrics ask for it, too.
        """
        here, new = set[int](), list[SchedulerConfig]()
        for executor in executors:
            if executor in self._states:
                here.add(self._states[executor].kind)
            elif executor.config not in new:
                new.append(executor.config)
        return sum(
            here.isdisjoint(self._kinds_for(request)) and not any(fits(request, c) for c in new)
            for request in self._queue
        )

    def _kinds_for(self, request: Request) -> frozenset[int]:
        return self._groups[self._queue.group_of(request)]

    def _groups_for(self, here: Collection[int]) -> list[str] | None:
        """Returns the groups whose requests fit one of these executor kinds; None for all."""
        names = [name for name, kinds in self._groups.items() if not kinds.isdisjoint(here)]
        return None if len(names) == len(self._groups) else names

    def first_of(self, executors: Collection[ExecutorState]) -> Request | None:
        """Returns the first waiting request that fits one of these executors; None without one."""
        return next(self._fitting(executors), None)

    def _fitting(self, executors: Collection[ExecutorState]) -> Iterator[Request]:
        kinds = {self._states[each].kind for each in executors if each in self._states}
        if not kinds or not len(self._queue):
            return iter(())
        return self._queue.candidates(OpenLanes(groups=self._groups_for(kinds)))

    def is_held(self, request_id: str) -> bool:
        """Returns whether a request waits for a busy executor."""
        hold = self._holds.get(request_id)
        return hold is not None and not hold.is_over

    @property
    def next_hold_end_ns(self) -> int | None:
        """Time in ns at which the first hold ends; None without holds."""
        holds = self._holds.values()
        return min((hold.until_ns for hold in holds if not hold.is_over), default=None)

    def end_holds(self) -> None:
        """Ends holds whose time is over or whose request was passed too often."""
        for hold in self._holds.values():
            if not hold.is_over:
                hold.end(self._queue.now_ns)
                self.is_stale |= hold.is_over

    def obstacle(
        self, request: Request, executor: ExecutorState
    ) -> AdmissionBlocker | RoutingBlocker:
        """Returns the known reason why a waiting request does not begin at an executor."""
        if not executor.engine.fits(request):
            return RoutingBlocker.UNFIT
        blocker = executor.blockers.get(request)
        if blocker is not None:
            return blocker
        if not executor.engine.has_room:
            if executor.engine.num_preempted:
                return AdmissionBlocker.OTHERS_FIRST
            is_full = executor.engine.num_free_rows <= 0
            return AdmissionBlocker.ROWS if is_full else AdmissionBlocker.BLOCKS
        if self.is_held(request.request_id):
            return RoutingBlocker.BETTER_IS_BUSY
        if self._reserved.get(request.request_id, executor) is not executor:
            return RoutingBlocker.OTHERS_WAIT_THERE
        return RoutingBlocker.NONE

    # -- choice of an executor -----------------------------------------------------------------

    def view(self, executor: ExecutorState) -> EngineQueue:
        """Returns the waiting queue as seen by an executor that is about to plan a step."""
        self.looked_at = None
        return EngineQueue(self, self._queue, executor)

    def candidates(self, executor: ExecutorState, open_lanes: OpenLanes) -> Iterator[Request]:
        """Iterates over the requests that should begin at `executor` rather than elsewhere."""
        if executor not in self._states:
            return
        self._look()
        walk, state = _Walk(executor), self._states[executor]
        open_lanes.groups = self._groups_for((state.kind,))
        for request in self._queue.candidates(open_lanes):
            self.looked_at = request
            if walk.held and not self._may_pass(request, walk):
                return
            if not self._may_begin(request, executor, walk):
                continue
            before = _Before.of(executor.engine)
            yield request
            if request.status is RequestStatus.RUNNING:
                self._before[request.request_id] = before
                self._passed(walk)
                self._begun(request, state)

    def _may_pass(self, request: Request, walk: _Walk) -> bool:
        """Returns whether a request may begin before those that wait for busy executors."""
        is_as_urgent = self._queue.step_class(request) == self._queue.step_class(walk.held[0])
        return is_as_urgent and walk.num_passes_left > 0 and len(walk.held) < _MAX_HELD

    def _passed(self, walk: _Walk) -> None:
        """Counts a request that has begun before those that wait for busy executors."""
        for held in walk.held:
            hold = self._holds.get(held.request_id)
            if hold is not None:
                hold.num_passed += 1
        walk.num_passes_left -= bool(walk.held)

    def _may_begin(self, request: Request, executor: ExecutorState, walk: _Walk) -> bool:
        """Returns whether a request should begin at `executor`; notes a hold if it should wait."""
        if len(self._states) == 1:
            self._reasons[request.request_id] = (AssignedFor.ONLY_ONE, None, None)
            return not self._is_closed(executor, request)
        assigned = self._assigned.get(request.request_id)
        if assigned is not None:
            return assigned is executor
        if self._is_closed(executor, request) or self._takes_the_last(request, executor):
            return False
        if self._waits_elsewhere(request, executor, walk):
            return False
        options = self._options(request)
        if not request.unfinished or all(each is executor for each in options):
            self._reasons[request.request_id] = (AssignedFor.ONLY_ONE, None, None)
            return True
        if executor not in options:
            # Other executors have room, unless the request waits for this very executor.
            return self._reserved.get(request.request_id) is executor
        return self._best_of(request, options, walk) is executor

    def _waits_elsewhere(self, request: Request, executor: ExecutorState, walk: _Walk) -> bool:
        """Returns whether a request keeps waiting for the busy executor that was best for it."""
        hold = self._holds.get(request.request_id)
        if hold is None or hold.executor is executor or hold.executor in self._planning:
            return False
        state = self._states.get(hold.executor)
        hold.end(self._queue.now_ns)
        if hold.is_over or state is None or not state.is_open_soon:
            return False
        both = (state, self._states[executor])
        best, own = self._router.rank(request, both, hold.prefixes)
        if best.state is not state or not _is_worth_waiting(best, own):
            return False
        walk.wait(request, hold)
        return True

    def _is_closed(self, executor: ExecutorState, request: Request) -> bool:
        """Returns whether a request does not fit an executor, or must not begin there."""
        kinds, closed = self._kinds_for(request), self._closed_to(request)
        is_allowed = _is_allowed(executor, self._states[executor], kinds, closed)
        return not is_allowed or self._is_loaded_elsewhere(request, executor)

    def _is_loaded_elsewhere(self, request: Request, executor: ExecutorState) -> bool:
        """Returns whether another executor is loading a request's adapter, which it lacks here."""
        adapter = request.scheduling.adapter
        return (
            adapter != ""
            and not executor.engine.has_adapter(adapter)
            and any(each.engine.adapter_slots.is_loading(adapter) for each in self._states)
        )

    def _options(self, request: Request) -> dict[ExecutorState, HostState]:
        """Returns executors that could begin a request now or soon, with their states."""
        kinds, closed = self._kinds_for(request), self._closed_to(request)
        declined = self._declined.get(request.request_id, ())
        return {
            executor: state
            for executor, state in self._states.items()
            if state.is_open_soon
            and executor not in declined
            and _is_allowed(executor, state, kinds, closed)
            and not self._is_loaded_elsewhere(request, executor)
        }

    def _assign_best(self, request: Request, walk: _Walk) -> ExecutorState | None:
        """Assigns a request to an executor that can plan a step for it in this turn, if any."""
        if request.request_id in self._assigned:
            return None
        options = self._options(request)
        takers = (e for e in self._planning if e in options and self._can_take(e, request))
        taker = next(takers, None)
        if taker is None or (request.unfinished and len(options) > 1):
            return taker and self._best_of(request, options, walk)
        self._assign(request, taker, AssignedFor.ONLY_ONE)
        return taker

    def _can_take(self, executor: ExecutorState, request: Request) -> bool:
        """Returns whether a request may be assigned to an executor that plans in a moment."""
        is_open = executor in self._planning and self._states[executor].is_open
        return is_open and not self._takes_the_last(request, executor)

    def _best_of(
        self, request: Request, options: Mapping[ExecutorState, HostState], walk: _Walk
    ) -> ExecutorState | None:
        """Returns the executor at which a request begins in this turn; None if the request waits.

        Compares the costs of the request at `options`: executors that could begin it soon. A
        request that waits for a busy executor gets a hold.
        """
        prefixes = self._router.find(request)
        ranked = self._router.rank(request, list(options.values()), prefixes)
        best, following = next(ranked), next(ranked, None)
        elsewhere = [] if following is None else [following]
        for own in chain([best], elsewhere, ranked):
            executor = self._by_number[own.state.number]
            if executor is walk.executor or self._can_take(executor, request):
                break
        else:
            return None
        is_other = executor is not walk.executor
        if own is best:
            why = AssignedFor.ONLY_ONE if following is None else _reason(best, following)
            self._assign(request, executor, why, best, following, is_other=is_other)
            return executor
        hold = self._hold(request, own, best, prefixes)
        if hold is not None and not hold.is_over:
            walk.wait(request, hold)
            return None
        why = AssignedFor.BETTER_IS_BUSY if hold is None else AssignedFor.WAITED_LONG_ENOUGH
        self._assign(request, executor, why, own, best, is_other=is_other)
        return executor

    def _hold(
        self, request: Request, own: Choice, best: Choice, prefixes: Prefixes
    ) -> _Hold | None:
        """Returns the hold of a request that saves enough by waiting for the best executor."""
        if not _is_worth_waiting(best, own):
            return None
        hold = self._holds.get(request.request_id)
        if hold is not None:
            hold.executor = self._by_number[best.state.number]
            hold.prefixes = prefixes
        else:
            until_ns = self._queue.now_ns + int(own.cost_ns - best.cost_ns)
            hold = _Hold(self._by_number[best.state.number], until_ns, prefixes)
            self._holds[request.request_id] = hold
        hold.end(self._queue.now_ns)
        return hold

    def _assign(
        self,
        request: Request,
        executor: ExecutorState,
        why: AssignedFor,
        own: Choice | None = None,
        elsewhere: Choice | None = None,
        *,
        is_other: bool = True,
    ) -> None:
        """Notes why a request begins at `executor`, and assigns the request there if `is_other`.

        The executor that plans now checks for itself whether it can begin the request. Another
        executor plans in a moment, so the request is counted in its load already.
        """
        self._reasons[request.request_id] = (why, own, elsewhere)
        if is_other:
            self._assigned[request.request_id] = executor
            num_cached = 0 if own is None else own.num_cached
            self._expect(request, self._states[executor], num_cached)

    def _takes_the_last(self, request: Request, executor: ExecutorState) -> bool:
        """Returns whether a tenant would take the last executor with room for other tenants.

        A tenant that has nothing at other executors may take any executor, so that no tenant waits
        for ever.
        """
        shares = self._queue.shares
        if shares is None or not shares.is_shared or not executor.engine.takes_over(request):
            return False
        tenant = request.scheduling.tenant
        others = [(e, state) for e, state in self._states.items() if e is not executor]
        if any(state.is_open and e not in self._reserving for e, state in others):
            return False
        if any(e.engine.has_requests_of(tenant) for e, _ in others):
            return True
        begin_elsewhere = (name for name, e in self._assigned.items() if e is not executor)
        return any(
            assigned is not None and assigned.scheduling.tenant == tenant
            for assigned in map(self._queue.get, begin_elsewhere)
        )

    def _begun(self, request: Request, state: HostState) -> None:
        if request.request_id not in self._assigned:
            self._expect(request, state, request.num_cached_tokens)

    def _expect(self, request: Request, state: HostState, num_cached: int) -> None:
        """Counts a request in the load of the executor that computes it next."""
        self._router.given(state, request)
        if len(self._states) == 1 or not request.unfinished:
            return
        num_new = max(0, len(request.unfinished[0].token_ids) - num_cached)
        state.expect(request.num_rows_wanted, num_new)
        self._router.seen(state)

    def assignment(self, request: Request, executor: ExecutorState) -> Assignment:
        """Returns why a request begins at an executor, with numbers, for logs and metrics."""
        why, own, elsewhere = self._reasons.get(
            request.request_id, (AssignedFor.ONLY_ONE, None, None)
        )
        before = self._before.get(request.request_id) or _Before.of(executor.engine)
        if executor.engine.num_preempted > before.num_preempted:
            why = AssignedFor.OTHERS_YIELD
        elif self._reserved.get(request.request_id) is executor:
            why = AssignedFor.NO_ROOM_ANYWHERE
        is_compared = own is not None and elsewhere is not None
        return Assignment(
            why,
            request.num_cached_tokens,
            before.num_pending_tokens,
            before.num_running,
            int(own.cost_ns) // _US_NS if is_compared and own is not None else None,
            None if elsewhere is None else elsewhere.num_cached,
            None if elsewhere is None else int(elsewhere.cost_ns) // _US_NS,
        )

    # -- reservations --------------------------------------------------------------------------

    def waits_at(self, request: Request, executor: ExecutorState) -> bool:
        """Returns whether a request that lacks room at `executor` has its reservation there.

        A request without a reservation gets one at the best executor that has none yet.
        """
        if len(self._states) == 1:
            return True
        reserved = self._reserved.get(request.request_id)
        if reserved is None:
            reserved = self._best_free(request)
            if reserved is None:
                return False
            self.is_stale = True
            self._reserved[request.request_id] = reserved
            self._reserving[reserved] = request.request_id
        return reserved is executor

    def _best_free(self, request: Request) -> ExecutorState | None:
        states = [
            state
            for executor, state in self._states.items()
            if executor not in self._reserving and not self._is_closed(executor, request)
        ]
        prefixes = self._router.find(request)
        best = next(iter(self._router.rank(request, states, prefixes)), None)
        return None if best is None else self._by_number[best.state.number]

    # -- state of executors --------------------------------------------------------------------

    def _look(self) -> None:
        """Reads the states of executors that have changed."""
        if not self._changed or len(self._states) == 1:
            return
        usual_token_ns = self._usual_token_ns
        for executor in self._changed:
            state = self._states[executor]
            self._router.step_begins(state)
            state.look(usual_token_ns)
            self._router.seen(state)
        self._changed.clear()

    @property
    def _usual_token_ns(self) -> float:
        known = [state.token_ns for state in self._states.values() if state.is_measured]
        return sum(known) / len(known) if known else ASSUMED_TOKEN_NS


class EngineQueue:
    """Waiting queue as seen by one executor that plans a step."""

    def __init__(self, routing: Routing, queue: WaitingQueue, executor: ExecutorState) -> None:
        self._routing = routing
        self._queue = queue
        self._executor = executor

    @property
    def is_empty(self) -> bool:
        """Whether no waiting request could ever begin at this executor."""
        return self._routing.first_of([self._executor]) is None

    @property
    def waits_since_ns(self) -> int | None:
        """Time in ns at which the oldest waiting request was queued; None for an empty queue."""
        return self._queue.waits_since_ns

    def candidates(self, open_lanes: OpenLanes) -> Iterator[Request]:
        """Iterates over the requests that this executor may begin, in the order of the queue."""
        return self._routing.candidates(self._executor, open_lanes)

    def waits_here(self, request: Request) -> bool:
        """Returns whether a request that lacks room here eventually blocks later requests."""
        return self._routing.waits_at(request, self._executor)


def _is_allowed(
    executor: ExecutorState,
    state: HostState,
    kinds: Collection[int],
    closed: Collection[Hashable],
) -> bool:
    """Returns whether a request that fits `kinds` and failed at `closed` may begin there."""
    return state.kind in kinds and not (closed and executor.life in closed)


def _is_worth_waiting(best: Choice, own: Choice) -> bool:
    """Returns whether a request saves enough by waiting for the best executor."""
    return own.cost_ns - best.cost_ns > _LEAST_SAVED_RATIO * own.cost_ns


def _reason(best: Choice, next_best: Choice) -> AssignedFor:
    """Returns why the best executor beats the next best: load, cached prefix, or neither."""
    if are_alike(best, next_best):
        return AssignedFor.AS_GOOD
    if best.num_cached > next_best.num_cached:
        return AssignedFor.MOST_CACHED
    return AssignedFor.SOONEST
