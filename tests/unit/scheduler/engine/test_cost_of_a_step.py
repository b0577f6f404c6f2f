"""What a step costs does not grow with those who wait, nor faster than the rows that change.

Counted are lines of the core that run, so a loop over all of something shows, on any machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    Feature,
    PreemptionMode,
    SchedulingParams,
)
from tests.support.core.driver import CoreDriver

# A block taken is two lines of the pool, a block given back eight, and behind a window one more.
MOST_LINES_FOR_A_ROW = 14
POLICIES = list(QUEUE_POLICIES)


def num_lines(action: Callable[[], object]) -> int:
    """How many lines of the core run in `action`, and items that its comprehensions look at."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        nonlocal count
        count += event == "line"
        return trace if "scheduler_service" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


# -- rows that get a block in the same step --------------------------------------------------------


def lines_of_growing_step(
    num_rows: int, prompt: int, blocks_per_row: int, num_in_flight: int, **options: object
) -> int:
    """Returns the most lines of a step, some of which give every row a block or take one."""
    values: dict[str, object] = {
        "num_device_blocks": blocks_per_row * num_rows,
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": 16 * num_rows,
        "max_num_waiting": num_rows,
        "prefix_caching": False,
    }
    driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
    for _ in range(num_rows):
        driver.add(prompt, max_tokens=13)
    driver.step()
    for _ in range(num_in_flight):
        driver.plan()
    most = 0
    while driver.core.num_running:
        most = max(most, num_lines(driver.plan))
        driver.answer()
    assert driver.core.num_preemptions == 0
    return most


@pytest.mark.parametrize(
    ("prompt", "blocks_per_row", "num_in_flight", "options"),
    [
        (9, 12, 0, {}),
        (9, 12, 0, {"sliding_window": 5}),
        (9, 12, 1, {"sliding_window": 5}),
        (9, 12, 0, {"num_lookahead_slots": 6}),
        # Spare slots are taken back when all rows lack a block.
        (3, 4, 0, {"num_lookahead_slots": 8}),
    ],
)
def test_step_costs_a_few_lines_for_each_row_that_grows(
    prompt: int, blocks_per_row: int, num_in_flight: int, options: dict[str, object]
) -> None:
    few, many = (
        lines_of_growing_step(rows, prompt, blocks_per_row, num_in_flight, **options)
        for rows in (8, 64)
    )
    assert many - few <= MOST_LINES_FOR_A_ROW * (64 - 8)


# -- requests that wait ----------------------------------------------------------------------------


def waiting_driver(num_waiting: int, policy: str, **options: object) -> CoreDriver:
    """A core whose rows are all taken; the others wait, with three adapters and some tenants."""
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "num_device_blocks": 500,
        "max_num_waiting": num_waiting + 10,
        "features": frozenset({Feature.ADAPTERS}),
        "max_adapters": 1,
        "queue_policy": policy,
        "preemption_mode": PreemptionMode.RECOMPUTE,
    }
    driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
    for _ in range(4):
        driver.add(3, max_tokens=150, scheduling=SchedulingParams(priority=-9, adapter="a"))
    driver.step()
    for number in range(num_waiting):
        scheduling = SchedulingParams(
            priority=number % 3,
            tenant=f"t{number % 50}",
            adapter=["b", "c", "a", ""][number % 4],
            deadline_ns=10**12 + number if number % 2 else None,
        )
        driver.add(3, f"w{number}", scheduling=scheduling)
    driver.step()
    return driver


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_policy": BatchPolicyName.PREFILL_FIRST, "delay_factor": 2.0}],
    ids=["mixed", "delayed"],
)
def test_step_costs_the_same_when_many_more_requests_wait(
    policy: str, options: dict[str, object]
) -> None:
    def lines(num_waiting: int) -> int:
        driver = waiting_driver(num_waiting, policy, **options)
        return num_lines(driver.step)

    few, many = lines(200), lines(2000)
    assert many <= few + 20


@pytest.mark.parametrize("policy", POLICIES)
def test_step_costs_the_same_when_many_lack_an_adapter_slot(
    policy: str,
) -> None:
    def lines(num_waiting: int) -> int:
        driver = waiting_driver(0, policy, max_num_seqs=5, max_num_waiting=2 * num_waiting + 1)
        for _ in range(num_waiting):
            driver.add(3, scheduling=SchedulingParams(adapter="b"))
        driver.add(3, "plain")
        count = num_lines(driver.plan)
        assert "plain" in [name for name, _, _ in driver.rows_of(driver.in_flight[-1])]
        return count

    few, many = lines(50), lines(1000)
    assert many <= few + 20


@pytest.mark.parametrize("policy", POLICIES)
def test_step_costs_the_same_when_many_more_deadlines_are_past(policy: str) -> None:
    def lines(num_overdue: int) -> int:
        driver = CoreDriver(queue_policy=policy, max_num_waiting=2 * num_overdue + 1)
        for number in range(num_overdue):
            scheduling = SchedulingParams(priority=number % 2, deadline_ns=number)
            driver.add(3, scheduling=scheduling)
        driver.core.tick(10**9)
        return num_lines(driver.plan)

    few, many = lines(200), lines(2000)
    assert many <= few + 50


@pytest.mark.parametrize("policy", POLICIES)
def test_abort_costs_the_same_when_many_more_requests_wait(policy: str) -> None:
    def lines(num_waiting: int) -> int:
        driver = waiting_driver(num_waiting, policy)
        return num_lines(lambda: [driver.core.abort(f"w{number}") for number in range(100)])

    few, many = lines(200), lines(2000)
    assert many <= few + 200


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_requests_cost_the_same_beside_many_groups(
    policy: str,
) -> None:
    def lines(num_running: int, num_waiting: int) -> int:
        driver = CoreDriver(
            queue_policy=policy,
            max_num_seqs=2 * num_running,
            num_device_blocks=16 * num_running + 64,
            max_num_batched_tokens=16 * num_running,
            max_num_waiting=2 * (num_running + num_waiting),
        )
        for _ in range(num_running):
            driver.add(3, n=2, max_tokens=100)
        driver.step()
        driver.step()
        for number in range(num_waiting):
            driver.add(3, scheduling=SchedulingParams(tenant=f"t{number}", priority=number % 3))
        return num_lines(driver.plan)

    few, many = (lines(running, 16) - lines(running, 0) for running in (8, 64))
    assert many <= few + 20
