"""Nothing is refused for its deadline that the executor could have finished in time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.planning import MAX_REFUSALS, MIN_SMALLEST_STEPS
from scheduler_service.scheduler.values import Request, SchedulingParams, StepPlan
from tests.support.core.driver import CoreDriver

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "40"))
BUDGET = 16
MS = 1_000_000


@dataclass(frozen=True, slots=True)
class SlowExecutor:
    """How long steps take at least, and how they vary: the more there is to do, the longer.

    `num_warm_up`: that many of the smallest steps are slower before the executor is as fast as it
    can be with them; larger steps are as slow as chance has it at any time.
    """

    us_per_step: int
    us_per_token: int
    us_per_position: int
    num_warm_up: int

    def least_us(self, num_tokens: int, num_positions: int) -> int:
        """What a step takes at least: `num_positions` are read in it."""
        more_us = self.us_per_token * num_tokens + self.us_per_position * num_positions
        return self.us_per_step + more_us

    def least_ns(self, request: Request, num_outputs: int) -> int:
        """What all steps take at least that compute a prompt and so many outputs, one by one."""
        num_prompt_tokens, total_us = request.sequence.num_prompt_tokens, 0
        for start in range(0, num_prompt_tokens, BUDGET):
            end = min(start + BUDGET, num_prompt_tokens)
            total_us += self.least_us(end - start, end)
        for position in range(num_prompt_tokens, num_prompt_tokens + num_outputs - 1):
            total_us += self.least_us(1, position + 1)
        return total_us * 1000


class Load:
    """Requests with and without deadlines, some hopeless; steps of all sizes and speeds."""

    def __init__(self, executor: SlowExecutor, rng: Random) -> None:
        self.executor, self.rng = executor, rng
        self.driver = CoreDriver(
            queue_policy="deadline",
            max_num_batched_tokens=BUDGET,
            num_device_blocks=500,
            max_num_waiting=500,
            prefix_caching=False,
        )
        self.now_ns = 0
        self.num_smallest = 0
        self.waiting: list[tuple[Request, int]] = []
        self.num_refused_early = 0

    def arrive(self) -> None:
        num_outputs = self.rng.choice([1, 1, 3, 20])
        num_prompt_tokens = self.rng.choice([1, 1, 2, 9, 40])
        scheduling = SchedulingParams(
            priority=self.rng.choice([0, 0, -1, 1]),
            deadline_ns=self.now_ns + self.rng.choice([1, 5, 20, 100, 1000]) * MS,
        )
        request = self.driver.add(
            num_prompt_tokens, scheduling=scheduling, max_tokens=num_outputs, ignore_eos=True
        )
        self.waiting.append((request, num_outputs))

    def serve_alone(self, num_requests: int) -> None:
        """A quiet time at first: the smallest steps there are."""
        for _ in range(num_requests):
            self.driver.add(1, max_tokens=1)
            self.step(num_arrivals=0)

    def step(self, num_arrivals: int | None = None) -> None:
        if num_arrivals is None:
            num_arrivals = self.rng.choice([0, 0, 0, 1, 3])
        for _ in range(num_arrivals):
            self.arrive()
        self.driver.core.tick(self.now_ns)
        plan = self.driver.plan()
        self.check_refusals(plan)
        if plan is None:
            self.now_ns += MS
            return
        step_us = self.step_us(plan)
        self.driver.answer(compute_us=step_us)
        self.now_ns += step_us * 1000

    def step_us(self, plan: StepPlan) -> int:
        work = plan.work
        ends = work.num_computed_tokens + work.num_new_tokens
        least_us = self.executor.least_us(plan.num_tokens, int(ends.sum()))
        if plan.num_tokens > 1:
            return least_us * self.rng.choice([1, 2, 40])
        self.num_smallest += 1
        return least_us * (50 if self.num_smallest <= self.executor.num_warm_up else 1)

    def check_refusals(self, plan: StepPlan | None) -> None:
        for request, num_outputs in self.waiting:
            deadline_ns = request.scheduling.deadline_ns or 0
            if request.error is not None:
                assert request.error[0] == "DEADLINE_UNREACHABLE"
                assert self.now_ns + self.executor.least_ns(request, num_outputs) > deadline_ns
                self.num_refused_early += self.now_ns <= deadline_ns
        self.waiting = [(request, n) for request, n in self.waiting if not request.is_finished]
        if plan is not None:
            new = {row.sequence.request for row in plan.new_rows}
            assert not any(self.is_too_late(request) for request in new)

    def is_too_late(self, request: Request) -> bool:
        deadline_ns = request.scheduling.deadline_ns
        has_run = request.num_preemptions > 0
        return not has_run and deadline_ns is not None and deadline_ns < self.now_ns


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    executor=st.builds(
        SlowExecutor,
        us_per_step=st.sampled_from([1, 500, 5000]),
        us_per_token=st.sampled_from([0, 100, 3000]),
        us_per_position=st.sampled_from([0, 10, 1000]),
        num_warm_up=st.integers(0, MIN_SMALLEST_STEPS - 1),
    ),
    num_alone=st.sampled_from([0, 1, MIN_SMALLEST_STEPS - 1, MIN_SMALLEST_STEPS, 30]),
    seed=st.integers(0, 2**32),
)
def test_request_is_not_refused_when_it_could_have_been_finished_in_time(
    executor: SlowExecutor, num_alone: int, seed: int
) -> None:
    load = Load(executor, Random(seed))
    load.serve_alone(num_alone)
    for _ in range(120):
        load.step()


def test_hopeless_requests_are_refused_before_their_deadline_when_the_executor_is_known() -> None:
    executor = SlowExecutor(us_per_step=5000, us_per_token=0, us_per_position=0, num_warm_up=0)
    load = Load(executor, Random(1))
    load.serve_alone(MIN_SMALLEST_STEPS)
    for _ in range(300):
        load.step()
    assert load.num_refused_early > 5


@pytest.mark.parametrize("num_running", [0, 3])
def test_requests_end_in_portions_and_never_run_when_they_are_overdue(num_running: int) -> None:
    driver = CoreDriver(queue_policy="deadline", max_num_waiting=5000, num_device_blocks=500)
    for _ in range(num_running):
        driver.add(3, max_tokens=150)
    if num_running:
        driver.step()
    num_overdue = 10 * MAX_REFUSALS
    for number in range(num_overdue):
        scheduling = SchedulingParams(priority=number % 3 - 1, deadline_ns=number)
        driver.add(3, scheduling=scheduling)
    driver.core.tick(MS)
    in_time = driver.add(3, "in time", scheduling=SchedulingParams(priority=9))
    num_ended = []
    for _ in range(12):
        plan = driver.plan()
        if plan is not None:
            assert {row.sequence.request for row in plan.new_rows} <= {in_time}
            assert len(driver.rows_of(plan)) == num_running + (not in_time.is_finished)
            driver.answer()
        num_ended.append(num_overdue - driver.core.num_waiting)
        assert num_ended[-1] == MAX_REFUSALS * min(len(num_ended), 10)
        assert driver.core.is_behind is (num_ended[-1] < num_overdue)
