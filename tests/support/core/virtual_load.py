"""An open load on a core, in virtual time: an executor whose steps take what its costs say.

Deterministic, and a second of load takes a fraction of one. Requests come whether or not others are
done; one that is refused because the queue is full does not come again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import StepOutcome, StepPlan, StepStatus
from scheduler_service.scheduler.values.request import Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from splitserve_rpc.domain_error import DomainError
from tests.support.core.engine_with_queue import EngineWithQueue

SAMPLED = 7
_FIRST_PROMPT_TOKEN = 10


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes: for itself, for each row, and for each token of a prompt."""

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
    """What became of a request; None: it was refused, or it is not that far."""

    arrival: Arrival
    first_token_us: int | None = None
    finished_us: int | None = None
    num_preemptions: int = 0

    @property
    def ttft_us(self) -> int | None:
        """From its arrival to its first token."""
        return None if self.first_token_us is None else self.first_token_us - self.arrival.at_us


def outcome_of(plan: StepPlan, costs: StepCosts) -> StepOutcome:
    """The answer of an executor that takes so long."""
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


@dataclass(slots=True)
class VirtualLoad:
    """A core, an executor of these costs, and the time. `depth`: steps in flight at once."""

    config: SchedulerConfig
    costs: StepCosts = field(default_factory=StepCosts)
    depth: int = 2
    num_steps: int = 0

    def run(self, arrivals: Iterable[Arrival], until_us: int) -> list[Fate]:
        """What became of these requests by `until_us`, in the order of their arrival."""
        core, in_flight = EngineWithQueue(self.config), deque[tuple[StepPlan, int]]()
        fates = [Fate(arrival) for arrival in sorted(arrivals, key=lambda each: each.at_us)]
        now_us, num_arrived = 0, 0
        while True:
            self._plan_steps(core, in_flight, now_us)
            next_us = [fate.arrival.at_us for fate in fates[num_arrived : num_arrived + 1]]
            next_us += [finished_us for _, finished_us in list(in_flight)[:1]]
            if not next_us or min(next_us) > until_us:
                return fates
            now_us = min(next_us)
            core.tick(now_us * 1000)
            if in_flight and in_flight[0][1] == now_us:
                plan, _ = in_flight.popleft()
                self._answer(core, plan, now_us, fates)
            while num_arrived < len(fates) and fates[num_arrived].arrival.at_us == now_us:
                self._add(core, num_arrived, fates[num_arrived])
                num_arrived += 1

    def _plan_steps(
        self, core: EngineWithQueue, in_flight: deque[tuple[StepPlan, int]], now_us: int
    ) -> None:
        while len(in_flight) < self.depth and (plan := core.schedule()) is not None:
            starts_us = in_flight[-1][1] if in_flight else now_us
            in_flight.append((plan, starts_us + self.costs.of(plan)))
            self.num_steps += 1

    def _answer(
        self, core: EngineWithQueue, plan: StepPlan, now_us: int, fates: Sequence[Fate]
    ) -> None:
        events = core.apply(outcome_of(plan, self.costs))
        for number in events.client_keys.tolist():
            if fates[number].first_token_us is None:
                fates[number].first_token_us = now_us
        for request in events.finished:
            fate = fates[request.client_key]
            fate.finished_us, fate.num_preemptions = now_us, request.num_preemptions

    def _add(self, core: EngineWithQueue, number: int, fate: Fate) -> None:
        arrival = fate.arrival
        # No two prompts begin alike.
        prompt = np.full(arrival.num_prompt_tokens, _FIRST_PROMPT_TOKEN, np.int32)
        prompt[0] += number
        request = Request.create(
            f"r{number}",
            prompt,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arrival.num_output_tokens),
            arrival=number,
            seed=0,
            scheduling=SchedulingParams(tenant=arrival.tenant),
        )
        request.client_key = number
        try:
            core.add(request)
        except DomainError as error:
            if error.reason != "QUEUE_FULL":
                raise
