"""Nobody waits for ever: under a flood without end, every request ends within bounded time."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.core.config import SchedulerConfig
from splitserve_rpc.domain_error import DomainError
from tests.property.core_workloads import configs, fit, random_spec
from tests.support.core_engine import CoreEngine
from tests.support.core_truth import Spec, create_request
from tests.support.fake_runner import FakeRunner
from tests.support.plan_executor import PlanExecutor

MAX_PROMPT = 12
MAX_TOKENS = 8
MAX_WAITING = 4
MIN_BUDGET = 8
NUM_STEPS = 1000
# More than twice of what was ever seen. What starves waits for all of the NUM_STEPS.
MAX_WAIT_STEPS = 600


@settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "15")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(config=configs(), seed=st.integers(0, 2**32), depth=st.integers(1, 3))
def test_request_ends_in_bounded_time_when_others_never_cease_to_come(
    config: SchedulerConfig, seed: int, depth: int
) -> None:
    config = replace(
        config,
        max_num_waiting=MAX_WAITING,
        max_num_batched_tokens=max(config.max_num_batched_tokens, MIN_BUDGET),
    )
    flood = Flood(config, seed, depth)
    for _ in range(NUM_STEPS):
        flood.step()
    assert flood.longest_wait <= MAX_WAIT_STEPS


class Flood:
    """Keeps the queue full, for the most part of urgent requests. Waits are counted in steps."""

    def __init__(self, config: SchedulerConfig, seed: int, depth: int) -> None:
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
        self.num_arrivals = 0
        self.waits: dict[int, int] = {}
        self.longest_wait = 0

    def step(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            self.arrive()
        self.engine.step()
        for arrival in list(self.waits):
            self.waits[arrival] += 1
            self.longest_wait = max(self.longest_wait, self.waits[arrival])
            if self.engine.deliveries[arrival].is_finished:
                del self.waits[arrival], self.engine.deliveries[arrival]

    def arrive(self) -> None:
        if self.engine.scheduler.is_queue_full:
            return
        self.num_arrivals += 1
        spec = fit(self.random_spec(), self.config, self.engine.now_ns)
        with suppress(DomainError):
            self.engine.add(create_request(spec, self.num_arrivals))
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
