"""Several cores behind one queue, and executors that compute nothing but take their time.

Whoever waits, what a step does and what is cached is decided by the scheduler's own code; only the
time is made up, so each run has the same figures and a minute of it takes seconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scheduler_service.fleet.fleet_queue import FleetQueue

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepOutcome, StepPlan, StepStatus
from scheduler_service.core.request import Int32Array, Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.fleet.router import Router
from tests.support.core.engine_with_queue import EngineWithQueue
from tests.support.core.virtual_load import StepCosts

SAMPLED = 7


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
    core: EngineWithQueue
    costs: StepCosts
    number: int
    in_flight: deque[tuple[StepPlan, int]] = field(default_factory=deque)


class VirtualFleet:
    """Executors with these costs. `depth`: steps in flight at once."""

    def __init__(
        self, executors: Sequence[tuple[SchedulerConfig, StepCosts]], router: Router, depth: int = 2
    ) -> None:
        self._executors = [
            _Executor(EngineWithQueue(config), costs, number)
            for number, (config, costs) in enumerate(executors)
        ]
        self._of_core = {executor.core: executor for executor in self._executors}
        self._queue = FleetQueue(executors[0][0].queue_policy, {}, router)
        self._depth = depth
        self._now_us = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.fates: list[Fate] = []

    def run(self, turns: Iterable[Turn], until_us: int) -> list[Fate]:
        """What became of these turns, and of those that followed, by `until_us`."""
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
        self._queue.push(request)
        self._dispatch([])

    def _dispatch(self, changed: list[EngineWithQueue]) -> None:
        woken = dict[_Executor, None]()
        for request, host, _ in self._queue.dispatch(self._now_us * 1000, self._of_core, changed):
            executor = self._of_core[host]  # type: ignore[index]
            executor.core.tick(self._now_us * 1000)
            executor.core.readmit(request)
            self.fates[request.client_key].host = executor.number
            woken[executor] = None
        for executor in woken:
            if executor.core not in changed:
                self._at(self._now_us, lambda each=executor: self._fill(each))  # type: ignore[misc]

    def _fill(self, executor: _Executor) -> None:
        core = executor.core
        while len(executor.in_flight) < self._depth:
            self._dispatch([core])
            core.tick(self._now_us * 1000)
            plan = core.schedule()
            if plan is None:
                return
            starts_us = executor.in_flight[-1][1] if executor.in_flight else self._now_us
            finished_us = starts_us + executor.costs.of(plan)
            executor.in_flight.append((plan, finished_us))
            self._at(finished_us, lambda: self._answer(executor))

    def _answer(self, executor: _Executor) -> None:
        plan, _ = executor.in_flight.popleft()
        token_ids = np.full(len(plan.work.row_ids), SAMPLED, np.int32)
        if plan.work.samples is not None:
            token_ids[~plan.work.samples] = -1
        executor.core.tick(self._now_us * 1000)
        cost_us = executor.costs.of(plan)
        events = executor.core.apply(
            StepOutcome(plan.step_id, StepStatus.OK, token_ids, compute_us=cost_us)
        )
        for number in events.client_keys.tolist():
            if self.fates[number].first_token_us is None:
                self.fates[number].first_token_us = self._now_us
        for request in events.finished:
            self._finish(request)
        self._fill(executor)

    def _finish(self, request: Request) -> None:
        fate = self.fates[request.client_key]
        fate.is_finished = True
        fate.num_cached_tokens = request.num_cached_tokens
        fate.num_preemptions = request.num_preemptions
        self._queue.forget(request.request_id)
        following = fate.turn.follow(self._now_us)
        if following is not None:
            self._await_turn(following)
