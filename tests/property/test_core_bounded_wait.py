"""Nobody waits for ever: under a flood without end, every request ends within bounded time.

And nobody waits without need: for an adapter's slot if it has none, for the tokens of less urgent
decodes if it is urgent.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.queue import QUEUE_POLICIES, TURN_EVERY
from scheduler_service.scheduler.values import (
    Feature,
    PreemptionMode,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    Speculation,
    StepStatus,
)
from splitserve_contract import DomainError
from tests.property.core_workloads import MAX_MODEL_LEN, VOCAB_SIZE, configs, fit, random_spec
from tests.support.core.driver import make_config
from tests.support.core.engine import CoreEngine
from tests.support.core.plan_executor import PlanExecutor
from tests.support.fakes.expected_outputs import Spec, create_request
from tests.support.fakes.fake_runner import FakeRunner

MAX_PROMPT = 12
MAX_TOKENS = 8
MAX_WAITING = 4
MIN_BUDGET = 8
NUM_STEPS = 1000
# More than twice of what was ever seen. What starves waits for all of the NUM_STEPS.
MAX_WAIT_STEPS = 600
MAX_SLOT_WAIT_STEPS = 200
# With two rows. It is 225 and more where urgent requests always go first.
MAX_SCARCE_WAIT_STEPS = 160
NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "6"))
PREEMPTED_IN_TURNS = make_config(
    queue_policy="priority",
    speculation=Speculation.PROMPT_LOOKUP,
    preemption_mode=PreemptionMode.AUTO,
    features=frozenset(Feature) - {Feature.ADAPTERS},
    num_lookahead_slots=3,
    sliding_window=3,
    block_size=3,
    num_device_blocks=22,
    num_host_blocks=0,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({0}),
    max_draft_tokens=8,
)
# What is bounded are steps: how long they take is up to the machine and the number of examples.
pytestmark = pytest.mark.timeout(3600)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    config=configs(),
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    steps_per_failure=st.sampled_from([0, 30, 1000]),
)
# A request that has the turn and is less urgent than preempted ones, which came back before the
# request that they were preempted for, without end.
@example(config=PREEMPTED_IN_TURNS, seed=533734, depth=2, steps_per_failure=0)
def test_request_ends_in_bounded_time_when_others_never_cease_to_come(
    config: SchedulerConfig, seed: int, depth: int, steps_per_failure: int
) -> None:
    config = replace(
        config,
        max_num_waiting=MAX_WAITING,
        max_num_batched_tokens=max(config.max_num_batched_tokens, MIN_BUDGET),
    )
    flood = Flood(config, seed, depth, steps_per_failure)
    for _ in range(NUM_STEPS):
        flood.step()
    assert flood.longest_wait <= MAX_WAIT_STEPS


@pytest.mark.parametrize("policy", list(QUEUE_POLICIES))
def test_request_has_its_turn_when_urgent_ones_never_cease_to_come(policy: str) -> None:
    config = make_config(
        queue_policy=policy,
        max_num_seqs=2,
        num_device_blocks=24,
        max_num_waiting=MAX_WAITING,
        max_num_batched_tokens=16,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
    )
    flood = Flood(config, seed=1, depth=1)
    for _ in range(NUM_STEPS):
        flood.step()
    assert flood.longest_wait <= MAX_SCARCE_WAIT_STEPS


def roomy_config(**options: object) -> SchedulerConfig:
    """Rows and blocks for everybody: what is scarce is what `options` say."""
    values: dict[str, object] = {
        "max_num_seqs": 60,
        "num_device_blocks": 2000,
        "max_num_batched_tokens": 2000,
        "max_num_waiting": 200,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
    }
    return make_config(**(values | options))


@pytest.mark.parametrize("policy", list(QUEUE_POLICIES))
@settings(max_examples=max(1, NUM_EXAMPLES // 3), deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 2), max_adapters=st.integers(1, 2))
def test_only_those_with_adapters_wait_and_not_for_ever_when_slots_are_scarce(
    policy: str, seed: int, depth: int, max_adapters: int
) -> None:
    config = roomy_config(
        queue_policy=policy,
        features=frozenset({Feature.ADAPTERS}),
        max_adapters=max_adapters,
        max_num_seqs=300,
    )
    flood = AdapterFlood(config, seed, depth)
    for _ in range(260):
        flood.step()
        for request in flood.engine.scheduler.queue:
            assert request.scheduling.adapter, "it waits though nothing lacks"
    assert flood.longest_wait <= MAX_SLOT_WAIT_STEPS


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    policy=st.sampled_from(["priority", "deadline"]),
    budget=st.integers(12, 40),
    num_patient=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 2),
)
@example(policy="priority", budget=12, num_patient=40, seed=40, depth=1)
def test_urgent_prompt_is_computed_as_if_alone_when_patient_ones_fill_the_steps(
    policy: str, budget: int, num_patient: int, seed: int, depth: int
) -> None:
    config = roomy_config(queue_policy=policy, max_num_batched_tokens=budget, max_num_seqs=12)
    flood = Flood(config, seed, depth)
    flood.fill_with_patience(num_patient)
    for _ in range(10):
        num_steps, num_tokens, protected = flood.serve_urgent()
        # Who had its turn to be admitted goes first, and then on, a token each step. One step in
        # nine is for those that yield; those in flight come before it.
        least = -(-num_tokens // (budget - len(protected)))
        assert num_steps <= least + least // TURN_EVERY + 2 + depth


class Flood:
    """Keeps the queue full, for the most part of urgent requests. Waits are counted in steps.

    One in `steps_per_failure` steps fails, so that there are suspects; 0: none.
    """

    def __init__(
        self, config: SchedulerConfig, seed: int, depth: int, steps_per_failure: int = 0
    ) -> None:
        runner = FakeRunner(
            block_size=config.block_size,
            num_device_blocks=config.num_device_blocks,
            num_host_blocks=config.num_host_blocks,
            vocab_size=config.vocab_size,
            sliding_window_tokens=config.sliding_window,
            us_per_block=5,
            us_per_token=10,
        )
        self.config = config
        self.engine = CoreEngine(config, runner, PlanExecutor, depth=depth)
        self.rng = Random(seed)
        self.steps_per_failure = steps_per_failure
        self.num_arrivals = 0
        self.waits: dict[int, int] = {}
        self.longest_wait = 0

    def step(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            self.arrive()
        self.engine.fill()
        if self.engine.in_flight:
            self.answer()
        for arrival in list(self.waits):
            self.waits[arrival] += 1
            self.longest_wait = max(self.longest_wait, self.waits[arrival])
            if self.engine.deliveries[arrival].is_finished:
                del self.waits[arrival], self.engine.deliveries[arrival]

    def answer(self) -> None:
        if self.steps_per_failure and self.rng.randrange(self.steps_per_failure) == 0:
            plan, _ = self.engine.in_flight[0]
            if plan.base_step_id is None and self.rng.random() < 0.5:
                self.engine.skip(StepStatus.REFUSED)
            else:
                self.engine.fail()
        else:
            self.engine.answer()

    def arrive(self) -> None:
        if self.engine.scheduler.is_queue_full:
            return
        self.num_arrivals += 1
        spec = fit(self.random_spec(), self.config, self.engine.now_ns)
        with suppress(DomainError):
            request = create_request(spec, self.num_arrivals)
            # Some were suspects elsewhere.
            request.trial_size = int(self.steps_per_failure > 0 and self.rng.random() < 0.02)
            self.engine.add(request)
            self.waits[self.num_arrivals] = 0

    def random_spec(self) -> Spec:
        spec = random_spec(self.rng)
        num_tokens = self.rng.randint(1, MAX_TOKENS)
        return replace(
            spec,
            prompt=spec.prompt[:MAX_PROMPT],
            params=replace(spec.params, max_tokens=num_tokens, min_tokens=0),
            scheduling=replace(
                spec.scheduling, priority=self.rng.choice([-1, -1, -1, 0, 1]), deadline_ns=None
            ),
        )

    # -- one at a time -----------------------------------------------------------------------------

    def add(self, num_tokens: int, max_tokens: int, scheduling: SchedulingParams) -> Request:
        self.num_arrivals += 1
        prompt = [self.rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request.create(
            f"r{self.num_arrivals}",
            prompt,
            params,
            arrival=self.num_arrivals,
            seed=0,
            scheduling=scheduling,
        )
        self.engine.add(request)
        return request

    def fill_with_patience(self, num_requests: int) -> None:
        """Requests that are not urgent, some of them still prompts."""
        for _ in range(num_requests):
            num_tokens = self.rng.choice([1, 1, 1, 20])
            self.add(num_tokens, MAX_MODEL_LEN - num_tokens, SchedulingParams(priority=3))
        for _ in range(self.rng.randint(0, 20)):
            self.engine.step()

    def serve_urgent(self) -> tuple[int, int, set[Request]]:
        """An urgent request comes and ends.

        Returns steps till its first token, tokens of its prompt and of those that were protected
        meanwhile, and who is protected.
        """
        num_tokens = self.rng.randint(1, MAX_MODEL_LEN - 2)
        urgent = self.add(num_tokens, 1, SchedulingParams(priority=-3))
        num_steps, before = 0, self.protected
        while not urgent.is_finished:
            num_steps += 1
            assert self.engine.step()
        after = self.protected
        num_tokens += sum(r.sequence.num_prompt_tokens for r in after - before)
        return num_steps, num_tokens, before | after

    @property
    def protected(self) -> set[Request]:
        """Unfinished requests that were admitted because it was their turn."""
        deliveries = self.engine.deliveries.values()
        return {d.request for d in deliveries if d.request.is_protected and not d.is_finished}


class AdapterFlood(Flood):
    """There is always somebody with the adapter "a", so its slot never comes free by itself."""

    def arrive(self) -> None:
        adapter = self.rng.choice(["a", "a", "a", "a", "b", "c", "", ""])
        scheduling = SchedulingParams(
            priority=self.rng.choice([-1, 0, 1]),
            tenant=self.rng.choice(["x", "y"]),
            adapter=adapter,
        )
        scheduler = self.engine.scheduler
        if scheduler.num_running + scheduler.num_waiting < self.config.max_num_seqs - 2:
            self.add(self.rng.randint(1, 4), self.rng.randint(1, 12), scheduling)
            self.waits[self.num_arrivals] = 0
