"""Prompts are divided into chunks that fit into the time of a step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.engine import StepLoad
from scheduler_service.scheduler.values import Request, SchedulingParams, StepPlan
from tests.support.core.driver import CoreDriver

BLOCK = 16
LONG = 16_000
STEP_MS = 100


@dataclass(slots=True)
class Machine:
    """An executor whose steps take what their size says, in us."""

    fixed_us: float = 8000.0
    decode_us: float = 300.0
    token_us: float = 500.0
    attend_us: float = 0.1

    def duration_us(self, plan: StepPlan) -> float:
        size = StepLoad.of(plan)
        return (
            self.alone_us(size.num_decodes)
            + self.token_us * size.num_prompt_tokens
            + self.attend_us * size.num_attended
        )

    def alone_us(self, num_decodes: int) -> float:
        return self.fixed_us + self.decode_us * num_decodes


def make_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {
        "block_size": BLOCK,
        "num_device_blocks": 20_000,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2 * LONG,
        "max_num_seqs": 64,
        "prefix_caching": False,
        "step_time_ms": STEP_MS,
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def decodes(driver: CoreDriver, machine: Machine, number: int) -> None:
    """Rows that have had some tokens."""
    for prompt in range(number):
        driver.add(20 + prompt, max_tokens=LONG, ignore_eos=True)
        execute(driver, machine)
    for _ in range(20 if number else 0):
        execute(driver, machine)


def execute(driver: CoreDriver, machine: Machine, noise: float = 1.0) -> tuple[StepPlan, float]:
    plan = driver.plan()
    assert plan is not None
    took_us = machine.duration_us(plan) * noise
    driver.answer(compute_us=max(int(took_us), 1))
    return plan, took_us


def until_the_end(
    driver: CoreDriver, machine: Machine, request: Request
) -> list[tuple[StepPlan, float]]:
    steps = []
    while not request.is_finished:
        steps.append(execute(driver, machine))
        assert len(steps) < 10_000
    return steps


@pytest.mark.parametrize("num_decodes", [0, 1, 8, 32])
def test_long_prompt_is_divided_by_time(num_decodes: int) -> None:
    driver, machine = make_driver(), Machine()
    decodes(driver, machine, num_decodes)
    for _ in range(2):
        request = driver.add(LONG, max_tokens=1)
        steps = until_the_end(driver, machine, request)
        for plan, _ in steps[:-1]:
            assert StepLoad.of(plan).num_decodes == num_decodes
    # Of the second one: the rates were learned with the first.
    is_kept = [0.8 < took_us / 1000 / STEP_MS < 1.2 for _, took_us in steps[:-1]]
    assert is_kept.count(False) <= 3
    assert all(is_kept[10:])


def test_prompts_get_most_of_the_time_where_decodes_take_long() -> None:
    driver, machine = make_driver(), Machine(fixed_us=90_000, token_us=5000)
    decodes(driver, machine, 1)
    request = driver.add(4000, max_tokens=1)
    for _, took_us in until_the_end(driver, machine, request)[20:-1]:
        assert 3.2 < took_us / machine.alone_us(1) < 4.8


@pytest.mark.parametrize("target_ms", [60, 30])
def test_target_for_the_time_between_tokens_is_kept(target_ms: int) -> None:
    driver, machine = make_driver(target_itl_ms=target_ms), Machine(token_us=200)
    decodes(driver, machine, 4)
    request = driver.add(8000, max_tokens=1)
    for _, took_us in until_the_end(driver, machine, request)[20:-1]:
        assert 0.7 * target_ms < took_us / 1000 < 1.2 * target_ms


def test_prompt_alone_ignores_the_target() -> None:
    driver, machine = make_driver(target_itl_ms=20), Machine()
    request = driver.add(4000, max_tokens=1)
    for _, took_us in until_the_end(driver, machine, request)[20:-1]:
        assert took_us / 1000 > 0.8 * STEP_MS


def test_unreachable_target_leaves_a_quarter_of_the_time_to_prompts() -> None:
    driver, machine = make_driver(target_itl_ms=1), Machine(token_us=20, attend_us=0)
    decodes(driver, machine, 4)
    request = driver.add(8000, max_tokens=1)
    for _, took_us in until_the_end(driver, machine, request)[20:-1]:
        assert 1.02 < took_us / machine.alone_us(4) < 1.5


@pytest.mark.parametrize("policy", ["priority", "deadline"])
def test_step_keeps_the_shortest_target_when_requests_state_some(policy: str) -> None:
    driver, machine = make_driver(queue_policy=policy), Machine(token_us=200)
    for target_ms in (None, 60, 40):
        decode(driver, machine, SchedulingParams(target_itl_ms=target_ms))
    assert 0.7 < longest_chunk_ms(driver, machine) / 40 < 1.2


def test_step_takes_its_usual_time_when_the_request_with_a_target_has_ended() -> None:
    driver, machine = make_driver(queue_policy="priority"), Machine(token_us=200)
    decode(driver, machine, SchedulingParams())
    wanted = decode(driver, machine, SchedulingParams(target_itl_ms=40))
    driver.core.abort(wanted.request_id)
    assert longest_chunk_ms(driver, machine) > 0.8 * STEP_MS


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_targets_of_requests_have_no_effect_when_the_policy_ignores_them(policy: str) -> None:
    driver, machine = make_driver(queue_policy=policy), Machine(token_us=200)
    decode(driver, machine, SchedulingParams(target_itl_ms=20))
    assert longest_chunk_ms(driver, machine) > 0.8 * STEP_MS


@pytest.mark.parametrize(("priority", "is_kept"), [(-1, False), (0, True), (1, True)])
def test_target_counts_when_the_prompt_is_not_more_urgent(priority: int, is_kept: bool) -> None:
    driver, machine = make_driver(queue_policy="priority"), Machine(token_us=200)
    decode(driver, machine, SchedulingParams(target_itl_ms=40))
    took_ms = longest_chunk_ms(driver, machine, SchedulingParams(priority=priority))
    assert (took_ms < 1.2 * 40) is is_kept


def test_first_chunk_ignores_the_target_when_the_waiting_prompt_is_more_urgent() -> None:
    sizes = []
    for priority in (-1, 0):
        driver, machine = make_driver(queue_policy="priority"), Machine(token_us=200)
        decode(driver, machine, SchedulingParams(target_itl_ms=40))
        longest_chunk_ms(driver, machine)
        driver.add(8000, max_tokens=1, scheduling=SchedulingParams(priority=priority))
        plan, _ = execute(driver, machine)
        sizes.append(StepLoad.of(plan).num_prompt_tokens)
    assert sizes[0] > 2 * sizes[1]


def decode(driver: CoreDriver, machine: Machine, scheduling: SchedulingParams) -> Request:
    """A request that has had some tokens."""
    request = driver.add(20, max_tokens=LONG, ignore_eos=True, scheduling=scheduling)
    for _ in range(10):
        execute(driver, machine)
    return request


def longest_chunk_ms(
    driver: CoreDriver, machine: Machine, scheduling: SchedulingParams | None = None
) -> float:
    """Duration of the longest step of a long prompt, from the time at which rates are known."""
    request = driver.add(8000, max_tokens=1, scheduling=scheduling or SchedulingParams())
    return max(took_us for _, took_us in until_the_end(driver, machine, request)[20:-1]) / 1000


def test_no_limit_without_a_time() -> None:
    driver, machine = make_driver(step_time_ms=0), Machine()
    decodes(driver, machine, 1)
    driver.add(LONG, max_tokens=1)
    plan, _ = execute(driver, machine)
    assert plan.num_tokens == 2048


def test_clock_counts_if_the_executor_reports_no_times() -> None:
    driver, machine = make_driver(), Machine()
    request, now_ns = driver.add(LONG, max_tokens=1), 0
    sizes = []
    while (plan := driver.plan()) is not None:
        now_ns += int(machine.duration_us(plan) * 1000)
        driver.core.tick(now_ns)
        driver.answer()
        sizes.append(machine.duration_us(plan))
    assert request.is_finished
    assert max(sizes[20:]) < 1.2e3 * STEP_MS


def test_tenants_in_turn_begin_beside_a_long_prompt() -> None:
    driver, machine = make_driver(queue_policy="fair"), Machine()
    decodes(driver, machine, 1)
    driver.add(LONG, max_tokens=1)
    for _ in range(20):
        execute(driver, machine)
    newcomer = driver.add(BLOCK, scheduling=SchedulingParams(tenant="b"), max_tokens=1)
    execute(driver, machine)
    assert newcomer.is_finished


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    fixed_ms=st.floats(0.3, 60),
    decode_part=st.floats(0.001, 0.2),
    token_part=st.floats(0.0003, 0.3),
    attend_part=st.floats(1e-5, 3e-4),
    noise=st.sampled_from([0.0, 0.1, 0.3]),
    drift=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_time_is_kept_and_no_prompt_starves_whatever_the_executor_does(
    seed: int,
    fixed_ms: float,
    decode_part: float,
    token_part: float,
    attend_part: float,
    noise: float,
    drift: float,
) -> None:
    """With noisy times, outliers, and a machine that becomes faster or slower.

    The durations that count are those without the noise: it is not the budget's fault.
    """
    rng = random.Random(seed)
    fixed_us = 1000 * fixed_ms
    token_us = fixed_us * token_part
    machine = Machine(fixed_us, fixed_us * decode_part, token_us, token_us * attend_part)
    driver = make_driver()
    decodes(driver, machine, rng.choice([1, 4, 16]))
    kept = []
    for number in range(2):
        request = driver.add(2000, max_tokens=1)
        for step in range(2000 // BLOCK + 2):
            outlier = 10.0 if rng.random() < 0.01 else 1.0
            plan, _ = execute(driver, machine, outlier * rng.uniform(1 - noise, 1 + noise))
            size = StepLoad.of(plan)
            # Each step brings all decodes their tokens, and the prompt a block or more.
            assert size.num_prompt_tokens >= BLOCK or request.is_finished
            if request.is_finished:
                break
            if BLOCK < size.num_prompt_tokens < 1024:
                alone_us = machine.alone_us(size.num_decodes)
                wanted_us = max(1000 * STEP_MS, 4 * alone_us)
                if step > 40 or (number, drift) == (1, 1.0):
                    kept.append(machine.duration_us(plan) < 1.2 * wanted_us + BLOCK * token_us)
        assert request.is_finished
        machine = Machine(*(drift * us for us in (fixed_us, machine.decode_us, token_us, 0.0)))
    assert kept.count(False) <= 0.1 * len(kept)


@settings(max_examples=40)
@given(
    policy=st.sampled_from(["priority", "deadline"]),
    targets=st.lists(
        st.tuples(st.integers(-1, 1), st.sampled_from([None, 1, 20, 60_000])),
        min_size=1,
        max_size=8,
    ),
    prompt=st.integers(-1, 1),
    fixed_us=st.floats(300, 60_000),
    token_part=st.floats(0.0003, 0.3),
)
def test_prompts_keep_a_quarter_of_the_time_whatever_targets_requests_state(
    policy: str,
    targets: list[tuple[int, int | None]],
    prompt: int,
    fixed_us: float,
    token_part: float,
) -> None:
    machine = Machine(fixed_us, fixed_us / 50, fixed_us * token_part, 0.0)
    driver = make_driver(queue_policy=policy)
    for priority, target_ms in targets:
        decode(driver, machine, SchedulingParams(priority=priority, target_itl_ms=target_ms))
    request = driver.add(4000, max_tokens=1, scheduling=SchedulingParams(priority=prompt))
    alone_us = machine.alone_us(len(targets))
    counting = [ms for priority, ms in targets if ms is not None and priority <= prompt]
    wanted_us = max(1000.0 * min([STEP_MS, *counting]), alone_us * 4 / 3)
    for plan, took_us in until_the_end(driver, machine, request)[20:-1]:
        size = StepLoad.of(plan)
        prompt_us = took_us - machine.alone_us(size.num_decodes)
        is_full = size.num_prompt_tokens + size.num_decodes == 2048
        assert prompt_us > 0.2 * took_us or is_full
        # The decodes of less urgent requests give way to a prompt.
        if counting and size.num_decodes == len(targets) and size.num_prompt_tokens > BLOCK:
            assert took_us < 1.25 * wanted_us
