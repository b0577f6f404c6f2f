"""Prefix caching through the core: what is shared is computed once, and is what it should be."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.config import BatchPolicyName, PreemptionMode
from scheduler_service.scheduler.values.request import SchedulingParams
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver

COMMON = list(range(1, 33))


def num_computed(engine: CheckedEngine) -> int:
    """Runs to the end; returns how many input tokens all steps had."""
    count = 0
    while True:
        before = engine.core.last_step_id
        engine.engine.fill()
        plans = [plan for plan, _ in engine.engine.in_flight]
        count += sum(plan.num_tokens for plan in plans if plan.step_id > before)
        if not engine.engine.in_flight:
            assert engine.runner.violations == []
            engine.check()
            return count
        engine.answer()


# -- within a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompts_compute_their_common_prefix_once_when_they_arrive_together(depth: int) -> None:
    engine = CheckedEngine(
        depth=depth,
        max_num_seqs=32,
        max_num_waiting=32,
        max_num_batched_tokens=512,
        num_device_blocks=256,
    )
    for number in range(32):
        engine.add([*COMMON, 100 + number, 200 + number], max_tokens=1)
    assert num_computed(engine) == 32 + 32 * 2
    assert [r.num_cached_tokens for r in engine.requests] == [0] + [32] * 31


@pytest.mark.parametrize("batch_policy", BatchPolicyName)
@pytest.mark.parametrize("budget", [5, 8, 17])
def test_prompts_compute_their_common_prefix_once_when_it_takes_several_steps(
    budget: int, batch_policy: BatchPolicyName
) -> None:
    engine = CheckedEngine(max_num_batched_tokens=budget, batch_policy=batch_policy)
    for number in range(5):
        engine.add([*COMMON, 100 + number], max_tokens=1)
    assert num_computed(engine) <= 32 + 5 + 4 * 4  # At most a part of a block is computed twice.


def test_prompt_finds_a_chunk_when_a_running_prefill_computes_it_in_the_same_step() -> None:
    driver = CoreDriver(max_num_batched_tokens=24)
    driver.add(COMMON, "first")
    assert driver.next_rows() == [("first", 0, 24)]
    driver.answer()
    driver.add([*COMMON[:28], 90], "second")
    assert driver.next_rows() == [("first", 24, 8), ("second", 28, 1)]


def test_block_is_findable_when_the_last_token_of_a_prompt_fills_it_alone() -> None:
    driver = CoreDriver(max_num_batched_tokens=3)
    driver.add(4, max_tokens=1)
    driver.run()
    assert driver.core.num_cached_blocks == 1


def test_prompts_share_nothing_when_one_opts_out() -> None:
    driver = CoreDriver()
    private = SchedulingParams(uses_prefix_cache=False)
    driver.add(13, "private", scheduling=private)
    driver.add(13, "first")
    driver.add(13, "second")
    driver.add(13, "private too", scheduling=private)
    assert driver.next_rows() == [
        ("private", 0, 13),
        ("first", 0, 13),
        ("second", 12, 1),
        ("private too", 0, 13),
    ]


def test_prompts_share_nothing_when_their_salts_differ() -> None:
    driver = CoreDriver()
    for salt in ("a", "b", "a"):
        driver.add(13, scheduling=SchedulingParams(cache_salt=salt))
    assert driver.next_rows() == [("r1", 0, 13), ("r2", 0, 13), ("r3", 12, 1)]


def test_readers_get_their_tokens_when_the_writer_is_aborted_in_flight() -> None:
    engine = CheckedEngine()
    engine.add([*COMMON, 50], "writer", max_tokens=9)
    engine.add([*COMMON, 60], "reader", max_tokens=9)
    engine.engine.fill()
    engine.core.abort("writer")
    del engine.requests[0]
    engine.run()
    assert engine.requests[0].num_cached_tokens == 32


def test_urgent_request_preempts_nobody_when_it_has_found_his_pending_blocks() -> None:
    engine = CheckedEngine(num_device_blocks=7, queue_policy="priority", max_num_batched_tokens=17)
    engine.add([90], max_tokens=3, scheduling=SchedulingParams(priority=-5))
    patient = engine.add(COMMON[:24], max_tokens=4, scheduling=SchedulingParams(priority=5))
    engine.step()
    # The patient one computes its last two blocks in the next step; the urgent one would share
    # all six, and lacks a seventh.
    engine.add([*COMMON[:24], 60], max_tokens=3)
    engine.step()
    assert patient.num_preemptions == 0
    engine.run()
    assert patient.num_preemptions == 1


# -- from request to request -------------------------------------------------------------------


def test_conversation_goes_on_from_its_answer_when_it_was_decoded_before() -> None:
    engine = CheckedEngine()
    engine.add(COMMON[:10], max_tokens=9)
    engine.run()
    answer = engine.engine.delivered["r1"][0]
    follower = engine.add([*COMMON[:10], *answer, 70], max_tokens=3)
    engine.run()
    # The last token of the answer was never computed.
    assert follower.num_cached_tokens == 16


def test_answer_is_not_findable_when_its_request_opts_out() -> None:
    driver = CoreDriver()
    driver.add(3, scheduling=SchedulingParams(uses_prefix_cache=False), max_tokens=9)
    driver.run()
    assert driver.core.num_cached_blocks == 0


def test_conversation_goes_on_from_its_answer_when_it_was_several() -> None:
    engine = CheckedEngine(depth=2)
    engine.add(COMMON[:10], max_tokens=12, n=2)
    engine.run()
    for answer in engine.engine.delivered["r1"]:
        follower = engine.add([*COMMON[:10], *answer], max_tokens=3)
        engine.run()
        assert follower.num_cached_tokens == 20


def test_preempted_request_computes_only_what_was_lost_when_its_blocks_are_still_there() -> None:
    driver = CoreDriver(preemption_mode=PreemptionMode.RECOMPUTE)
    request = driver.add(13)
    driver.step()
    driver.preempt(request)
    assert driver.next_rows() == [("r1", 12, 2)]


def test_num_cached_tokens_counts_only_the_prompt_when_a_request_is_resumed() -> None:
    engine = CheckedEngine()
    engine.add(COMMON, max_tokens=1)
    engine.run()
    driver = CoreDriver()
    driver.add(20, max_tokens=1)
    driver.run()
    request = driver.add(5, resume=[[1 + p for p in range(5, 20)]])
    driver.step()
    assert request.num_cached_tokens == 5


# -- the host pool gives evicted blocks a second chance ----------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("num_host_blocks", "num_cached"), [(16, 24), (0, 0), (3, 0)])
def test_evicted_prefix_comes_back_when_the_host_pool_kept_it(
    num_host_blocks: int, num_cached: int, depth: int
) -> None:
    engine = CheckedEngine(num_device_blocks=10, num_host_blocks=num_host_blocks, depth=depth)
    engine.add(COMMON[:25], max_tokens=3)
    engine.run()
    for start in (100, 200):
        engine.add(list(range(start, start + 36)), max_tokens=3)
        engine.run()
    again = engine.add(COMMON[:25], max_tokens=3)
    engine.run()
    assert again.num_cached_tokens == num_cached


def test_requests_get_their_tokens_when_both_pools_overflow() -> None:
    engine = CheckedEngine(num_device_blocks=9, num_host_blocks=4, depth=2)
    for number in range(12):
        start = number % 4 * 10
        engine.add(COMMON[start : start + 12], max_tokens=8)
    engine.run()
