"""Executors behind the scheduler, which compute nothing but take their time.

The scheduler's own code decides who waits, what a step does and what is cached; only the time is
made up, so each run has the same figures and a minute of it takes seconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_service.scheduler import Scheduler, effects, events
from scheduler_service.scheduler.routing import Router
from scheduler_service.scheduler.values import (
    FleetConfig,
    Int32Array,
    Request,
    SamplingParams,
    SchedulerConfig,
    StepEvents,
    StepPlan,
)
from tests.support.core.virtual_fleet import StepCosts, outcome_of


@dataclass(slots=True, eq=False)
class Turn:
    """A request that comes at `at_us`; what follows its end, if anything does."""

    at_us: int
    prompt: Int32Array
    num_output_tokens: int
    follow: Callable[[int], Turn | None] = lambda _now_us: None


@dataclass(slots=True)
class Fate:
    """What became of a turn. `host`: who had it last."""

    turn: Turn
    host: int = -1
    first_token_us: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class _Executor:
    """Simulated executor: duration of its steps, and steps in flight with their end times."""

    address: str
    number: int
    costs: StepCosts
    in_flight: deque[tuple[StepPlan, int]] = field(default_factory=deque)


class VirtualFleet:
    """Executors with these costs. `depth`: steps in flight at once."""

    def __init__(
        self, executors: Sequence[tuple[SchedulerConfig, StepCosts]], router: Router, depth: int = 2
    ) -> None:
        self._scheduler = Scheduler(FleetConfig(queue_policy=executors[0][0].queue_policy), router)
        self._executors: dict[str, _Executor] = {}
        self._now_us = 0
        self._wakes_us: int | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.fates: list[Fate] = []
        for number, (config, costs) in enumerate(executors):
            address = f"executor:{number}"
            self._executors[address] = _Executor(address, number, costs)
            self._handle(events.ExecutorJoined(address, 1, config, depth))
            self._handle(events.ExecutorConnected(address))

    def run(self, turns: Iterable[Turn], until_us: int) -> list[Fate]:
        """Returns what became of these turns, and of those that followed, by `until_us`."""
        for turn in turns:
            self._await_turn(turn)
        while self._events and self._events[0][0] <= until_us:
            self._now_us, _, happen = heapq.heappop(self._events)
            happen()
        return self.fates

    def _at(self, at_us: int, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_us, next(self._order), happen))

    def _await_turn(self, turn: Turn) -> None:
        self._at(turn.at_us, lambda: self._arrive(turn))

    def _arrive(self, turn: Turn) -> None:
        number = len(self.fates)
        self.fates.append(Fate(turn))
        request = Request.create(
            f"r{number}",
            turn.prompt,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=turn.num_output_tokens),
            arrival=number,
            seed=0,
        )
        request.client_key = number
        self._handle(events.RequestSubmitted(request))

    def _answer(self, executor: _Executor) -> None:
        plan, _ = executor.in_flight.popleft()
        outcome = outcome_of(plan, executor.costs)
        self._handle(events.StepCompleted(executor.address, outcome))

    def _tick(self, at_us: int) -> None:
        if self._wakes_us == at_us:
            self._wakes_us = None
            self._handle(events.Tick())

    def _handle(self, event: events.Event) -> None:
        for effect in self._scheduler.handle(event, self._now_us * 1000):
            match effect:
                case effects.SendStep(address, plan):
                    self._send(self._executors[address], plan)
                case effects.RequestAssigned(request, address):
                    self.fates[request.client_key].host = self._executors[address].number
                case effects.DeliverTokens(told):
                    self._deliver(told)
                case effects.WakeAt(at_ns):
                    self._wake_at(at_ns)

    def _wake_at(self, at_ns: int | None) -> None:
        at_us = self._wakes_us = None if at_ns is None else max(self._now_us, -(-at_ns // 1000))
        if at_us is not None:
            self._at(at_us, lambda: self._tick(at_us))

    def _send(self, executor: _Executor, plan: StepPlan) -> None:
        in_flight = executor.in_flight
        starts_us = in_flight[-1][1] if in_flight else self._now_us
        finished_us = starts_us + executor.costs.of(plan)
        in_flight.append((plan, finished_us))
        self._at(finished_us, lambda: self._answer(executor))

    def _deliver(self, told: StepEvents) -> None:
        for number in told.client_keys.tolist():
            if self.fates[number].first_token_us is None:
                self.fates[number].first_token_us = self._now_us
        for request in told.finished:
            fate = self.fates[request.client_key]
            fate.is_finished = True
            fate.num_cached_tokens = request.num_cached_tokens
            fate.num_preemptions = request.num_preemptions
            following = fate.turn.follow(self._now_us)
            if following is not None:
                self._await_turn(following)
