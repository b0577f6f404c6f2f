"""An open load on several cores with one queue before them, in virtual time.

The same as `virtual_load`, for a fleet: decisions are those of the queue and of the cores together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import Request, SchedulingParams
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.fleet.fleet_queue import FleetQueue
from scheduler_service.fleet.host_state import Host
from tests.support.core.virtual_load import Arrival, Fate, StepCosts, outcome_of


@dataclass(slots=True, eq=False)
class _Executor:
    """A core, and the steps in flight with the time at which each is done."""

    core: Scheduler
    costs: StepCosts
    in_flight: deque[tuple[StepPlan, int]] = field(default_factory=deque)


class VirtualFleet:
    """Executors of these costs, and a queue that takes `max_num_waiting` requests for each."""

    def __init__(self, config: SchedulerConfig, costs: list[StepCosts], depth: int = 2) -> None:
        self._executors = [_Executor(Scheduler(config), each) for each in costs]
        self._by_core: dict[Host, _Executor] = {each.core: each for each in self._executors}
        self._depth = depth
        self._queue = FleetQueue(config.queue_policy, config.tenant_weights)
        self._num_places = config.max_num_waiting * len(costs)
        self._now_us = 0
        self._fates: list[Fate] = []
        # When a step is done, and whose.
        self._done: list[tuple[int, int]] = []

    def run(self, arrivals: Iterable[Arrival], until_us: int) -> list[Fate]:
        """What became of these requests by `until_us`, in the order of their arrival."""
        self._fates = [Fate(each) for each in sorted(arrivals, key=lambda each: each.at_us)]
        num_arrived = 0
        while True:
            next_us = [fate.arrival.at_us for fate in self._fates[num_arrived : num_arrived + 1]]
            next_us += [at_us for at_us, _ in self._done[:1]]
            if not next_us or min(next_us) > until_us:
                return self._fates
            self._now_us = min(next_us)
            while self._done and self._done[0][0] == self._now_us:
                self._answer(self._executors[heappop(self._done)[1]])
            while (
                num_arrived < len(self._fates)
                and self._fates[num_arrived].arrival.at_us == self._now_us
            ):
                self._add(num_arrived)
                num_arrived += 1

    def _add(self, number: int) -> None:
        arrival = self._fates[number].arrival
        # No two prompts begin alike.
        prompt = np.full(arrival.num_prompt_tokens, 10, np.int32)
        prompt[0] += number
        n = arrival.num_sequences
        request = Request.create(
            f"r{number}",
            prompt,
            SamplingParams(ignore_eos=True, max_tokens=arrival.num_output_tokens, n=n),
            arrival=number,
            seed=0,
            scheduling=SchedulingParams(tenant=arrival.tenant),
        )
        request.client_key = number
        if self._queue.has_place(request, self._num_places):
            self._queue.push(request)
            self._dispatch([])

    def _dispatch(self, changed: list[Host]) -> None:
        """Gives requests to cores, which then plan steps if they have none to wait for."""
        cores, given = list(self._by_core), dict[Host, None]()
        now_ns = self._now_us * 1000
        for request, host, _ in self._queue.dispatch(now_ns, cores, changed, self._take_back):
            core = self._by_core[host].core
            core.tick(now_ns)
            core.readmit(request)
            given[host] = None
        for host in given:
            if host not in changed:
                self._fill(self._by_core[host])

    def _take_back(self, host: Host, request_id: str) -> None:
        request = self._by_core[host].core.withdraw(request_id)
        assert request is not None
        self._queue.push(request)

    def _fill(self, executor: _Executor) -> None:
        core, in_flight = executor.core, executor.in_flight
        while len(in_flight) < self._depth:
            self._dispatch([core])
            core.tick(self._now_us * 1000)
            if (plan := core.schedule()) is None:
                return
            starts_us = in_flight[-1][1] if in_flight else self._now_us
            done_us = starts_us + executor.costs.of(plan)
            in_flight.append((plan, done_us))
            heappush(self._done, (done_us, self._executors.index(executor)))

    def _answer(self, executor: _Executor) -> None:
        plan, _ = executor.in_flight.popleft()
        executor.core.tick(self._now_us * 1000)
        events = executor.core.apply(outcome_of(plan, executor.costs))
        self._queue.charge(events.num_sampled)
        for number in events.client_keys.tolist():
            fate = self._fates[number]
            if fate.first_token_us is None:
                fate.first_token_us = self._now_us
        for sequences in events.finished:
            fate = self._fates[sequences.client_key]
            fate.finished_us, fate.num_preemptions = self._now_us, sequences.num_preemptions
            self._queue.forget(sequences.request_id)
        self._fill(executor)
