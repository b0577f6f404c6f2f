"""What a step is made of: mixed batches, and prompts before decodes."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.planning.batch_policy import (
    BatchPolicy,
    PrefillFirst,
    QueueState,
    make_batch_policy,
)
from scheduler_service.scheduler.values.config import BatchPolicyName
from tests.support.core.driver import CoreDriver, make_config

PREFILL_FIRST = BatchPolicyName.PREFILL_FIRST


def begins_with_decodes(
    policy: BatchPolicy,
    *,
    has_prompts: bool = True,
    num_swapped: int = 0,
    oldest_wait_us: float = 0.0,
    prefill_us: float = 0.0,
) -> bool:
    state = QueueState(has_prompts, num_swapped, oldest_wait_us, prefill_us)
    return policy.shapes(state)[0].runs_decodes


# -- the policies ------------------------------------------------------------------------------


def test_mixed_batches_do_everything_in_one_step_when_all_kinds_wait() -> None:
    policy = make_batch_policy(make_config(batch_policy=BatchPolicyName.MIXED))
    (shape,) = policy.shapes(
        QueueState(has_prompts=True, num_swapped=2, oldest_wait_us=0.0, prefill_us=0.0)
    )
    assert shape.runs_decodes
    assert shape.takes_swapped
    assert shape.takes_waiting
    assert shape.splits_prompts


def test_prefill_first_computes_prompts_before_decodes_when_some_wait() -> None:
    assert not begins_with_decodes(PrefillFirst(0.0))


def test_prefill_first_decodes_when_nothing_waits() -> None:
    assert begins_with_decodes(PrefillFirst(0.0), has_prompts=False)


def test_prefill_first_decodes_when_somebody_is_swapped_out() -> None:
    assert begins_with_decodes(PrefillFirst(0.0), num_swapped=1)


def test_prefill_first_tries_the_other_kind_when_the_first_gives_nothing_to_do() -> None:
    for num_swapped in (0, 1):
        shapes = PrefillFirst(0.0).shapes(
            QueueState(
                has_prompts=True, num_swapped=num_swapped, oldest_wait_us=0.0, prefill_us=0.0
            )
        )
        assert {shape.runs_decodes for shape in shapes} == {True, False}


@pytest.mark.parametrize(("oldest_wait_us", "decodes"), [(0, True), (199, True), (200, False)])
def test_prefill_first_lets_prompts_gather_when_there_is_a_delay_factor(
    oldest_wait_us: float, decodes: bool
) -> None:
    policy = PrefillFirst(delay_factor=2.0)
    assert begins_with_decodes(policy, oldest_wait_us=oldest_wait_us, prefill_us=100.0) is decodes


# -- through the core --------------------------------------------------------------------------


def test_schedule_adds_prompts_to_decodes_when_batches_are_mixed() -> None:
    driver = CoreDriver(batch_policy=BatchPolicyName.MIXED, prefix_caching=False)
    driver.add(5, "old")
    driver.step()
    driver.add(5, "new")
    assert driver.next_rows() == [("old", 5, 1), ("new", 0, 5)]


def test_schedule_leaves_decodes_out_when_prompts_come_first() -> None:
    driver = CoreDriver(batch_policy=PREFILL_FIRST, prefix_caching=False)
    driver.add(5, "old")
    driver.step()
    driver.add(5, "new")
    assert driver.next_rows() == [("new", 0, 5)]
    driver.answer()
    assert driver.next_rows() == [("old", 5, 1), ("new", 5, 1)]


def test_schedule_splits_no_prompt_when_prompts_come_first() -> None:
    driver = CoreDriver(batch_policy=PREFILL_FIRST, max_num_batched_tokens=10, prefix_caching=False)
    driver.add(6, "first")
    driver.add(6, "second")
    plan, _ = driver.step()
    assert plan.num_tokens == 6
    assert driver.next_rows() == [("second", 0, 6)]


def test_schedule_splits_a_prompt_when_no_step_has_room_for_all_of_it() -> None:
    driver = CoreDriver(batch_policy=PREFILL_FIRST, max_num_batched_tokens=10, prefix_caching=False)
    driver.add(25, "long", max_tokens=1)
    assert [driver.step()[0].num_tokens for _ in range(3)] == [10, 10, 5]


def test_schedule_waits_for_more_prompts_when_there_is_a_delay_factor() -> None:
    driver = CoreDriver(batch_policy=PREFILL_FIRST, delay_factor=0.5, prefix_caching=False)
    driver.add(30, "old")
    driver.plan()
    driver.answer(compute_us=1000)
    driver.core.tick(1_000_000)
    driver.add(5, "new")
    planned = []
    for now_ns in (1_000_000, 1_499_000, 1_500_000):
        driver.core.tick(now_ns)
        planned.append(driver.next_rows()[0][0])
        driver.answer(compute_us=10)
    assert planned == ["old", "old", "new"]


def test_schedule_does_not_wait_for_more_prompts_when_nobody_runs() -> None:
    driver = CoreDriver(batch_policy=PREFILL_FIRST, delay_factor=5.0)
    driver.add(30, max_tokens=1)
    driver.plan()
    driver.answer(compute_us=1000)
    driver.add(5, "new")
    assert driver.next_rows()[0][0] == "new"
