"""A short prompt takes a part of each step beside long ones, and takes no more than that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.planning import MAX_BYPASSES
from scheduler_service.scheduler.values import Request, SchedulingParams
from tests.support.core.driver import CoreDriver

BUDGET = 64
PART = BUDGET // 4
LONG = 4000


def make_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {
        "block_size": 16,
        "num_device_blocks": 4000,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 3 * LONG,
        "max_num_seqs": 32,
        "max_num_waiting": 200,
        "prefix_caching": False,
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def add(driver: CoreDriver, num_tokens: int, priority: int = 0) -> Request:
    return driver.add(num_tokens, max_tokens=1, scheduling=SchedulingParams(priority=priority))


def tokens_of(driver: CoreDriver, request: Request) -> int:
    """How many tokens of a request the next step computes."""
    plan = driver.plan()
    assert plan is not None
    found = {name: number for name, _, number in driver.rows_of(plan)}
    driver.answer()
    return found.get(request.request_id, 0)


def steps_until(driver: CoreDriver, request: Request) -> int:
    for step in range(10_000):
        if request.is_finished:
            return step
        driver.step()
    raise AssertionError("the request does not end")


def test_short_prompt_begins_beside_a_long_one() -> None:
    driver = make_driver()
    long = add(driver, LONG)
    driver.step()
    short = add(driver, PART)
    assert tokens_of(driver, short) == PART
    assert short.is_finished
    assert not long.is_finished


def test_prompt_longer_than_its_part_takes_several_steps() -> None:
    driver = make_driver()
    add(driver, LONG)
    driver.step()
    short = add(driver, 10 * PART)
    assert steps_until(driver, short) == 10


def test_long_prompt_takes_a_third_longer_at_most() -> None:
    driver = make_driver()
    long = add(driver, LONG)
    driver.step()
    num_steps = 1
    while not long.is_finished:
        add(driver, PART)
        driver.step()
        num_steps += 1
    assert LONG // BUDGET < num_steps <= -(-LONG * 4 // (3 * BUDGET)) + 1


def test_prompt_waits_when_it_is_not_short_beside_the_running_one() -> None:
    driver = make_driver()
    long = add(driver, LONG)
    driver.step()
    other = add(driver, LONG * 2 // 3)
    assert tokens_of(driver, long) == BUDGET
    assert other.sequence.num_output_tokens == 0
    assert steps_until(driver, long) == -(-LONG // BUDGET) - 2
    assert not other.is_finished


def test_one_prompt_at_a_time_begins_out_of_turn() -> None:
    driver = make_driver()
    add(driver, LONG)
    driver.step()
    first, second = add(driver, 10 * PART), add(driver, 9 * PART)
    assert tokens_of(driver, first) == PART
    assert tokens_of(driver, second) == 0
    assert [steps_until(driver, first), steps_until(driver, second)] == [8, 9]


@pytest.mark.parametrize(("policy", "is_passed"), [("fcfs", False), ("priority", True)])
def test_older_long_prompt_is_passed_when_the_policy_allows_it(
    policy: str, is_passed: bool
) -> None:
    driver = make_driver(queue_policy=policy)
    add(driver, LONG)
    driver.step()
    add(driver, LONG)
    short = add(driver, PART)
    assert bool(tokens_of(driver, short)) is is_passed


def test_waiting_prompt_is_passed_a_limited_number_of_times() -> None:
    driver = make_driver(queue_policy="priority")
    long = add(driver, 2 * LONG)
    driver.step()
    waiting = add(driver, LONG)
    num_passed = 0
    while not long.is_finished:
        short = add(driver, PART)
        driver.step()
        num_passed += short.is_finished
    assert num_passed == waiting.num_bypasses == MAX_BYPASSES


@pytest.mark.parametrize(("priority", "begins"), [(-1, True), (0, True), (1, False)])
def test_less_urgent_prompt_has_no_part(priority: int, begins: bool) -> None:
    driver = make_driver(queue_policy="priority")
    add(driver, LONG)
    driver.step()
    short = add(driver, PART, priority)
    assert bool(tokens_of(driver, short)) is begins


def test_prompt_is_short_when_most_of_it_is_cached() -> None:
    driver = make_driver(prefix_caching=True)
    prefix = [3] * (LONG // 2)
    driver.add(prefix, max_tokens=1)
    driver.run()
    long = driver.add([5] * (LONG // 2), max_tokens=1)
    driver.step()
    short = driver.add([*prefix, 4], max_tokens=1)
    driver.step()
    assert short.is_finished
    assert not long.is_finished


@pytest.mark.parametrize("is_preempted", [True, False])
def test_nothing_begins_out_of_turn_while_a_preempted_request_waits(is_preempted: bool) -> None:
    # There is room for one long prompt.
    driver = make_driver(queue_policy="priority", num_device_blocks=LONG // 16 * 3 // 2)
    if is_preempted:
        add(driver, LONG, priority=1)
        driver.step()
    urgent = add(driver, LONG)
    driver.step()
    assert driver.core.num_preempted == int(is_preempted)
    short = add(driver, PART)
    assert bool(tokens_of(driver, short)) is not is_preempted
    driver.run()
    assert urgent.is_finished
    assert short.is_finished


@settings(max_examples=200)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 1200), st.integers(0, 12)), min_size=1, max_size=12),
    policy=st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
)
def test_oldest_prompt_keeps_three_quarters_of_each_step_and_all_end(
    arrivals: list[tuple[int, int]], policy: str
) -> None:
    driver = make_driver(queue_policy=policy)
    waiting: list[Request] = []
    for num_tokens, num_steps in arrivals:
        waiting.append(add(driver, num_tokens))
        for _ in range(num_steps):
            if (plan := driver.plan()) is None:
                break
            rows = {name: (start, number) for name, start, number in driver.rows_of(plan)}
            waiting = [each for each in waiting if not each.is_finished]
            if policy == "fcfs":
                start, number = rows[waiting[0].request_id]
                assert number >= min(BUDGET - PART, len(waiting[0].sequence.token_ids) - start)
            driver.answer()
    driver.run()
    assert driver.core.num_unfinished == 0
