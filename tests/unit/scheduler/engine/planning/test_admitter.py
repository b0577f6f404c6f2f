"""Who is admitted: swapped requests first, and nobody is passed by others for ever."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.blocks.prefix_cache import NO_HIT
from scheduler_service.scheduler.engine.planning.room import MAX_BYPASSES
from scheduler_service.scheduler.queue.queue_policy import QUEUE_POLICIES
from scheduler_service.scheduler.values.config import BatchPolicyName, Feature, PreemptionMode
from scheduler_service.scheduler.values.request import Request, RequestStatus, SchedulingParams
from tests.support.core.driver import CoreDriver, names


def adapter(name: str) -> SchedulingParams:
    return SchedulingParams(adapter=name)


def make_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {
        "features": frozenset({Feature.ADAPTERS}),
        "max_adapters": 1,
        "prefix_caching": False,
        "max_num_waiting": 200,
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


# -- adapters ----------------------------------------------------------------------------------


def test_admit_passes_a_request_when_its_adapter_has_no_slot() -> None:
    driver = make_driver()
    driver.add(3, "a1", scheduling=adapter("a"))
    driver.add(3, "b1", scheduling=adapter("b"))
    driver.add(3, "a2", scheduling=adapter("a"))
    driver.add(3, "none")
    assert names(driver.next_rows()) == ["a1", "a2", "none"]


def test_admit_gives_the_slot_to_the_oldest_when_it_becomes_free() -> None:
    driver = make_driver()
    driver.add(3, "a1", scheduling=adapter("a"), max_tokens=1)
    driver.add(3, "b1", scheduling=adapter("b"))
    driver.add(3, "c1", scheduling=adapter("c"))
    driver.step()
    driver.add(3, "a2", scheduling=adapter("a"))
    assert names(driver.next_rows()) == ["b1"]


def test_admit_runs_as_many_adapters_as_a_step_may_have_when_more_wait() -> None:
    driver = make_driver(max_adapters=2)
    for name in "abcab":
        driver.add(3, scheduling=adapter(name))
    assert names(driver.next_rows()) == ["r1", "r2", "r4", "r5"]


def test_adapters_pass_no_more_when_one_without_a_slot_was_passed_often_enough() -> None:
    driver = make_driver(max_num_seqs=100)
    driver.add(1, "a", scheduling=adapter("a"), max_tokens=180)
    limited = driver.add(1, "b", scheduling=adapter("b"), max_tokens=1)
    passed_by = 0
    for number in range(2 * MAX_BYPASSES):
        driver.add(1, f"p{number}", scheduling=adapter("a"), max_tokens=1)
        if f"p{number}" in names(driver.next_rows()):
            passed_by += 1
        driver.answer()
    assert passed_by == MAX_BYPASSES
    assert limited.status is RequestStatus.WAITING
    driver.core.abort("a")
    assert names(driver.next_rows())[0] == "b"


ALL_POLICIES = list(QUEUE_POLICIES)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_requests_without_an_adapter_pass_for_ever_when_only_a_slot_is_lacking(policy: str) -> None:
    driver = make_driver(max_num_seqs=16, queue_policy=policy)
    driver.add(1, "a", scheduling=adapter("a"), max_tokens=190)
    driver.add(1, "b", scheduling=adapter("b"))
    for number in range(2 * MAX_BYPASSES):
        driver.add(1, f"p{number}", max_tokens=1)
        assert f"p{number}" in names(driver.next_rows())
        driver.answer()


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_request_without_an_adapter_runs_when_any_number_wait_for_slots(policy: str) -> None:
    driver = make_driver(queue_policy=policy)
    driver.add(1, "a", scheduling=adapter("a"), max_tokens=190)
    driver.step()
    for number in range(100):
        driver.add(1, scheduling=SchedulingParams(adapter=f"b{number % 3}", tenant=f"t{number}"))
    driver.add(1, "none", scheduling=SchedulingParams(tenant="last"))
    assert names(driver.next_rows()) == ["a", "none"]


def test_one_without_a_slot_is_next_when_those_that_passed_it_have_taken_all_rows() -> None:
    driver = make_driver(max_num_seqs=4)
    driver.add(1, "a", scheduling=adapter("a"), max_tokens=MAX_BYPASSES + 9)
    limited = driver.add(1, "b", scheduling=adapter("b"), max_tokens=1)
    while limited.num_bypasses < MAX_BYPASSES:
        driver.add(1, max_tokens=1)
        driver.step()
    for number in range(8):
        driver.add(1, f"p{number}", max_tokens=30)
    driver.step()
    driver.core.abort("a")
    driver.core.abort("p0")
    assert "b" in names(driver.next_rows())


def test_admit_keeps_a_request_at_its_place_when_others_pass() -> None:
    driver = make_driver(max_num_seqs=2)
    driver.add(1, "a", scheduling=adapter("a"), max_tokens=3)
    driver.add(1, "b", scheduling=adapter("b"))
    driver.add(1, "x", max_tokens=9)
    assert names(driver.next_rows()) == ["a", "x"]
    driver.answer()
    driver.add(1, "y")
    for _ in range(2):
        driver.step()
    assert names(driver.next_rows()) == ["x", "b"]


# -- blocks and rows ---------------------------------------------------------------------------


def start_large(driver: CoreDriver) -> Request:
    """Fills most of a pool of 8 blocks; a large request then waits, and a small one behind it."""
    driver.add(17, "running", max_tokens=60 // 4)
    driver.step()
    large = driver.add(16, "large", max_tokens=1)
    driver.add(2, "small", max_tokens=1)
    return large


def test_admit_lets_nobody_pass_when_first_come_is_first_served() -> None:
    driver = make_driver(num_device_blocks=8, queue_policy="fcfs")
    start_large(driver)
    assert names(driver.next_rows()) == ["running"]


@pytest.mark.parametrize("policy", ["priority", "fair", "deadline"])
def test_admit_lets_small_requests_pass_when_the_policy_is_not_strict(policy: str) -> None:
    driver = make_driver(num_device_blocks=8, queue_policy=policy)
    large = start_large(driver)
    assert names(driver.next_rows()) == ["running", "small"]
    assert large.num_bypasses == 1


def test_admit_lets_nobody_pass_when_a_large_request_was_passed_often_enough() -> None:
    driver = make_driver(num_device_blocks=8, queue_policy="priority")
    start_large(driver).num_bypasses = MAX_BYPASSES
    assert names(driver.next_rows()) == ["running"]


def test_admit_lets_nobody_pass_when_only_the_budget_is_spent() -> None:
    driver = make_driver(max_num_batched_tokens=8, batch_policy=BatchPolicyName.PREFILL_FIRST)
    driver.add(6, "first")
    driver.add(6, "second")
    driver.add(2, "third")
    assert names(driver.next_rows()) == ["first"]


def test_admit_leaves_a_watermark_when_others_run() -> None:
    driver = make_driver(num_device_blocks=200, max_num_batched_tokens=2000, max_model_len=900)
    driver.add(4, "running")
    driver.step()
    # The running one has two blocks by now; two more are the watermark.
    driver.add(197 * 4 - 4, "fits", max_tokens=1)
    assert names(driver.next_rows()) == ["running", "fits"]
    driver.answer()
    driver.add(197 * 4 - 3, "does not", max_tokens=1)
    assert names(driver.next_rows()) == ["running"]


# -- swapped requests --------------------------------------------------------------------------


def swapped_driver(max_tokens: int = 9, **options: object) -> tuple[CoreDriver, Request]:
    """A request is swapped out, another runs."""
    values: dict[str, object] = {
        "num_device_blocks": 12,
        "num_host_blocks": 12,
        "preemption_mode": PreemptionMode.SWAP,
    }
    driver = make_driver(**(values | options))
    driver.add(14, "running", max_tokens=max_tokens)
    swapped = driver.add(14, "swapped", max_tokens=9)
    driver.step()
    driver.preempt(swapped)
    return driver, swapped


def test_swap_in_waits_for_another_step_when_this_one_swaps_out() -> None:
    driver, _ = swapped_driver()
    plan, _ = driver.step()
    assert plan.moves.swap_out
    assert not plan.moves.swap_in
    assert driver.step()[0].moves.swap_in


def test_swap_in_comes_before_waiting_requests_when_both_want_blocks() -> None:
    driver, _ = swapped_driver()
    driver.step()
    driver.add(9, "new")
    assert names(driver.next_rows())[:2] == ["running", "swapped"]


def test_admit_takes_nobody_younger_when_a_swapped_request_cannot_come_back() -> None:
    driver, swapped = swapped_driver(num_device_blocks=8)
    driver.step()
    driver.add(1, "small")
    assert driver.core.num_free_blocks == 4
    assert names(driver.next_rows()) == ["running"]
    assert swapped.status is RequestStatus.SWAPPED


def test_admit_takes_nobody_younger_when_prompts_come_first_and_no_decode_can_run() -> None:
    driver, _ = swapped_driver(
        num_device_blocks=8, batch_policy=BatchPolicyName.PREFILL_FIRST, max_tokens=3
    )
    driver.step()
    driver.add(1, "small")
    assert names(driver.next_rows()) == ["running"]  # Its last token is on its way.
    assert driver.plan() is None


def test_swap_in_leaves_each_sequence_a_block_when_others_run() -> None:
    driver, swapped = swapped_driver(num_device_blocks=8)
    driver.step()
    # Four blocks are free, and it had four; the next token may need a fifth.
    assert driver.core.num_free_blocks == 4
    driver.step()
    assert swapped.status is RequestStatus.SWAPPED


def test_swap_in_waits_when_the_adapter_has_no_slot() -> None:
    driver = make_driver(num_host_blocks=12, preemption_mode=PreemptionMode.SWAP)
    swapped = driver.add(5, "a", scheduling=adapter("a"), max_tokens=9)
    driver.step()
    driver.preempt(swapped)
    driver.step()
    other = driver.add(5, "b", max_tokens=2)
    driver.core.queue.begun(other, 5)
    other.scheduling = adapter("b")
    driver.core.placement.start(other.sequence, NO_HIT)
    driver.add(5, "none", max_tokens=1)
    driver.add(5, "b2", scheduling=adapter("b"))
    # Who has no adapter takes nothing from it; who has one would keep the slot.
    assert names(driver.next_rows()) == ["b", "none"]
    driver.answer()
    assert names(driver.next_rows()) == ["b"]
    driver.answer()
    assert names(driver.next_rows()) == ["a"]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_whoever_made_way_stays_away_when_its_blocks_are_still_on_their_way(
    batch_policy: BatchPolicyName, depth: int
) -> None:
    driver = make_driver(
        num_device_blocks=12,
        num_host_blocks=12,
        preemption_mode=PreemptionMode.SWAP,
        queue_policy="priority",
        batch_policy=batch_policy,
        max_num_seqs=2,
    )
    slow = driver.add(14, "slow", max_tokens=30)
    driver.step()
    for _ in range(depth - 1):
        driver.plan()
    # There are blocks for it to come back, but neither blocks nor a row for the other beside it.
    urgency = SchedulingParams(priority=-1)
    urgent = driver.add(33, "urgent", scheduling=urgency, max_tokens=2, n=2)
    while not urgent.is_finished:
        while len(driver.in_flight) < depth and driver.plan() is not None:
            assert urgent.is_finished or slow.status is not RequestStatus.RUNNING
        driver.answer()
    assert urgent.error is None


@pytest.mark.parametrize("batch_policy", BatchPolicyName)
def test_swapped_requests_come_back_when_new_ones_keep_arriving(
    batch_policy: BatchPolicyName,
) -> None:
    driver, swapped = swapped_driver(batch_policy=batch_policy)
    for number in range(60):
        driver.add(2, f"n{number}", max_tokens=4)
        driver.step()
    assert swapped.is_finished
