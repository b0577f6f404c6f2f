"""An open load on executors behind the scheduler, in virtual time: steps take what their costs say.

Deterministic, without an event loop, and a second of load takes a fraction of one. Requests come
whether or not others are done; one that is refused does not come again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from scheduler_service.scheduler import Scheduler, effects, events
from scheduler_service.scheduler.values import (
    FleetConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from splitserve_contract import DomainError

SAMPLED = 7


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Duration of a step: a constant, and a part per row and per prompt token."""

    step_us: int = 10_000
    row_us: int = 20
    prompt_token_us: int = 100

    def of(self, plan: StepPlan) -> int:
        """Microseconds of a step."""
        num_rows = len(plan.work.row_ids)
        num_decodes = int(np.count_nonzero(plan.work.num_new_tokens == 1))
        num_prompt_tokens = plan.num_tokens - num_decodes
        return self.step_us + self.row_us * num_rows + self.prompt_token_us * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at `at_us`."""

    at_us: int
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_sequences: int = 1


@dataclass(slots=True)
class Fate:
    """Times of a request. None: it was refused, or has not come so far."""

    arrival: Arrival
    first_token_us: int | None = None
    finished_us: int | None = None
    num_preemptions: int = 0

    @property
    def ttft_us(self) -> int | None:
        """Time from arrival to first token."""
        return None if self.first_token_us is None else self.first_token_us - self.arrival.at_us


def outcome_of(plan: StepPlan, costs: StepCosts) -> StepOutcome:
    """Outcome of a step with this duration."""
    token_ids = np.full(len(plan.work.row_ids), SAMPLED, np.int32)
    if plan.work.samples is not None:
        token_ids[~plan.work.samples] = -1
    return StepOutcome(plan.step_id, StepStatus.OK, token_ids, compute_us=costs.of(plan))


def even_arrivals(
    tenant: str, per_s: float, until_us: int, *, num_prompt_tokens: int, num_output_tokens: int
) -> list[Arrival]:
    """Requests that come at a steady rate."""
    gap_us = round(1e6 / per_s)
    times = range(gap_us // 2, until_us, gap_us)
    return [Arrival(at_us, tenant, num_prompt_tokens, num_output_tokens) for at_us in times]


def random_arrivals(
    tenant: str,
    per_s: float,
    until_us: int,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    seed: int,
    num_sequences: int = 1,
) -> list[Arrival]:
    """Requests that come as a Poisson process."""
    rng, arrivals, at_us = np.random.default_rng(seed), list[Arrival](), 0.0
    while (at_us := at_us + rng.exponential(1e6 / per_s)) < until_us:
        arrivals.append(
            Arrival(int(at_us), tenant, num_prompt_tokens, num_output_tokens, num_sequences)
        )
    return arrivals


@dataclass(slots=True, eq=False)
class _Executor:
    """Step costs of an executor, and in-flight steps with completion times."""

    address: str
    costs: StepCosts
    in_flight: deque[tuple[StepPlan, int]] = field(default_factory=deque)


class VirtualFleet:
    """Executors of these costs, and a queue that takes `max_num_waiting` requests for each."""

    def __init__(self, config: SchedulerConfig, costs: list[StepCosts], depth: int = 2) -> None:
        self.scheduler = Scheduler(
            FleetConfig(
                queue_policy=config.queue_policy,
                tenant_weights=config.tenant_weights,
                max_num_waiting=config.max_num_waiting,
            )
        )
        self._executors: dict[str, _Executor] = {}
        self._now_us = 0
        self._wakes_us: int | None = None
        self._fates: list[Fate] = []
        # When a step is done, and whose.
        self._done: list[tuple[int, str]] = []
        for number, each in enumerate(costs):
            address = f"executor:{number}"
            self._executors[address] = _Executor(address, each)
            self._handle(events.ExecutorJoined(address, 1, config, depth))
            self._handle(events.ExecutorConnected(address))

    def run(self, arrivals: Iterable[Arrival], until_us: int) -> list[Fate]:
        """Returns the times of these requests until `until_us`, in order of arrival."""
        self._fates = [Fate(each) for each in sorted(arrivals, key=lambda each: each.at_us)]
        num_arrived = 0
        while True:
            next_us = [fate.arrival.at_us for fate in self._fates[num_arrived : num_arrived + 1]]
            next_us += [at_us for at_us, _ in self._done[:1]]
            next_us += [] if self._wakes_us is None else [max(self._wakes_us, self._now_us)]
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
            if self._wakes_us is not None and self._wakes_us <= self._now_us:
                self._wakes_us = None
                self._handle(events.Tick())

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
        try:
            self.scheduler.check(request)
        except DomainError:
            return
        self._handle(events.RequestSubmitted(request))

    def _answer(self, executor: _Executor) -> None:
        plan, _ = executor.in_flight.popleft()
        outcome = outcome_of(plan, executor.costs)
        self._handle(events.StepCompleted(executor.address, outcome))

    def _handle(self, event: events.Event) -> None:
        for effect in self.scheduler.handle(event, self._now_us * 1000):
            match effect:
                case effects.SendStep(address, plan):
                    self._send(self._executors[address], plan)
                case effects.DeliverTokens(told):
                    self._deliver(told)
                case effects.WakeAt(at_ns):
                    self._wakes_us = None if at_ns is None else -(-at_ns // 1000)

    def _send(self, executor: _Executor, plan: StepPlan) -> None:
        in_flight = executor.in_flight
        starts_us = in_flight[-1][1] if in_flight else self._now_us
        done_us = starts_us + executor.costs.of(plan)
        in_flight.append((plan, done_us))
        heappush(self._done, (done_us, executor.address))

    def _deliver(self, told: StepEvents) -> None:
        for number in told.client_keys.tolist():
            fate = self._fates[number]
            if fate.first_token_us is None:
                fate.first_token_us = self._now_us
        for event in told.tokens:
            fate = self._fates[event.sequence.request.client_key]
            if fate.first_token_us is None:
                fate.first_token_us = self._now_us
        for request in told.finished:
            fate = self._fates[request.client_key]
            fate.finished_us, fate.num_preemptions = self._now_us, request.num_preemptions
