"""Urgent prompts come before less urgent decodes, and these do not starve."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.queue.key_order import TURN_EVERY
from scheduler_service.scheduler.values.request import SchedulingParams
from tests.support.core.driver import CoreDriver

URGENT, NORMAL, PATIENT = (SchedulingParams(priority=priority) for priority in (-1, 0, 5))


def make_driver(num_decodes: int, policy: str = "priority", **options: object) -> CoreDriver:
    """Some patient requests decode, in steps of 8 tokens."""
    values: dict[str, object] = {
        "queue_policy": policy,
        "prefix_caching": False,
        "max_num_batched_tokens": 8,
        "num_device_blocks": 500,
        "max_num_waiting": 500,
    }
    driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
    for number in range(num_decodes):
        driver.add(1, f"p{number}", scheduling=PATIENT, max_tokens=190)
    while driver.core.num_waiting:
        driver.step()
    return driver


def num_tokens_of(driver: CoreDriver, name: str) -> int:
    """Plans and answers a step; how many tokens it has of a request."""
    tokens = {row_name: count for row_name, _, count in driver.next_rows()}
    driver.answer()
    return tokens.get(name, 0)


@pytest.mark.parametrize("policy", ["priority", "deadline"])
@pytest.mark.parametrize("num_decodes", [1, 6, 7, 8])
def test_urgent_prompt_has_all_the_tokens_of_steps_when_decodes_would_take_them(
    num_decodes: int, policy: str
) -> None:
    driver = make_driver(num_decodes, policy)
    driver.add(20, "urgent", scheduling=URGENT)
    assert [num_tokens_of(driver, "urgent") for _ in range(4)] == [8, 8, 4, 1]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_decodes_come_first_when_nobody_is_more_urgent(policy: str) -> None:
    driver = make_driver(5, policy)
    driver.add(20, "new", scheduling=URGENT)
    assert [num_tokens_of(driver, "new") for _ in range(3)] == [3, 3, 3]


def test_decodes_come_first_when_they_are_as_urgent() -> None:
    driver = make_driver(5)
    driver.add(20, "new", scheduling=PATIENT)
    assert num_tokens_of(driver, "new") == 3


def test_prompt_with_an_earlier_deadline_comes_first_when_decodes_have_none() -> None:
    driver = make_driver(7, "deadline")
    driver.add(16, "soon", scheduling=SchedulingParams(priority=5, deadline_ns=10**9))
    assert [num_tokens_of(driver, "soon") for _ in range(2)] == [8, 8]


def test_more_urgent_decodes_go_on_when_a_prompt_takes_tokens_from_others() -> None:
    driver = make_driver(6)
    driver.add(1, "first", scheduling=SchedulingParams(priority=-2))
    driver.step()
    driver.add(20, "urgent", scheduling=URGENT)
    tokens = {name: count for name, _, count in driver.next_rows()}
    assert tokens == {"first": 1, "urgent": 7}


def test_urgent_prompt_goes_first_when_a_less_urgent_prompt_runs_already() -> None:
    driver = make_driver(2)
    driver.add(100, "long", scheduling=NORMAL)
    assert num_tokens_of(driver, "long") == 8
    driver.add(20, "urgent", scheduling=URGENT)
    assert [num_tokens_of(driver, "urgent") for _ in range(3)] == [8, 8, 4]


def test_urgent_prompt_waits_one_step_in_nine_when_others_yield_to_it_for_long() -> None:
    driver = make_driver(7)
    driver.add(150, "urgent", scheduling=URGENT)
    counts = [num_tokens_of(driver, "urgent") for _ in range(2 * (TURN_EVERY + 1))]
    assert counts == ([8] * TURN_EVERY + [1]) * 2


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_decode_goes_on_when_urgent_prompts_never_cease_to_come(num_tokens: int) -> None:
    driver = make_driver(3, max_num_batched_tokens=num_tokens, max_num_seqs=400)
    most_tokens = dict.fromkeys(("p0", "p1", "p2"), 0)
    for number in range(40 * TURN_EVERY):
        driver.add(6, f"u{number}", scheduling=URGENT, max_tokens=2)
        for name, start, _ in driver.next_rows():
            if name in most_tokens:
                most_tokens[name] = start
        driver.answer()
    assert min(most_tokens.values()) >= 5


def test_urgent_prompt_is_not_held_up_when_the_turn_is_somebodys_who_lacks_a_row() -> None:
    driver = make_driver(TURN_EVERY)
    driver.add(1, "turn", scheduling=PATIENT)
    driver.add(16, "urgent", scheduling=URGENT)
    assert [num_tokens_of(driver, "urgent") for _ in range(3)] == [8, 8, 1]
