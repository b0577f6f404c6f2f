"""What a step is made of: decodes, prompts, snapshots and deltas, pipelining, deadlines."""

from __future__ import annotations

import tracemalloc

import pytest

from scheduler_service.scheduler.engine.planning import PrefillFirst, QueueState, earliest_finish_ns
from scheduler_service.scheduler.queue import TURN_EVERY
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    Request,
    SamplingParams,
    SchedulingParams,
)
from tests.support.core.driver import CoreDriver, EngineWithQueue, make_config

# -- what a step is made of --------------------------------------------------------------------


def test_schedule_orders_decodes_prefills_and_waiting_requests() -> None:
    driver = CoreDriver(max_num_batched_tokens=10, prefix_caching=False)
    driver.add(4, "decoding")
    driver.step()
    driver.add(15, "prefilling")
    driver.step()
    driver.add(10, "waiting")
    assert driver.next_rows() == [("decoding", 5, 1), ("prefilling", 9, 6), ("waiting", 0, 3)]


# -- pipelining --------------------------------------------------------------------------------


def test_schedule_refers_to_the_step_in_flight_when_pipelined() -> None:
    driver = CoreDriver()
    driver.add(3, max_tokens=10)
    first, second, third = driver.plan(), driver.plan(), driver.plan()
    assert first
    assert second
    assert third
    assert first.work.token_ids.tolist() == [1, 2, 3]
    assert second.work.token_ids.tolist() == third.work.token_ids.tolist() == []
    assert second.work.sampled_steps_back.tolist() == third.work.sampled_steps_back.tolist() == [1]


def test_schedule_refers_to_the_last_step_with_the_row() -> None:
    driver = CoreDriver(batch_policy=BatchPolicyName.PREFILL_FIRST, prefix_caching=False)
    driver.add(3, "old")
    assert driver.plan()
    driver.add(3, "new")
    assert driver.next_rows() == [("new", 0, 3)]
    plan = driver.plan()
    assert plan
    assert plan.work.sampled_steps_back.tolist() == [2, 1]


# -- snapshots and deltas ----------------------------------------------------------------------


def test_schedule_sends_a_snapshot_only_when_it_is_the_first() -> None:
    driver = CoreDriver()
    driver.add(3)
    plans = [driver.step()[0] for _ in range(3)]
    assert [plan.base_step_id for plan in plans] == [None, 1, 2]
    assert [len(plan.new_rows) for plan in plans] == [1, 0, 0]


def test_schedule_continues_the_numbers_of_earlier_steps() -> None:
    driver = CoreDriver()
    driver.core = EngineWithQueue(make_config(), last_step_id=41)
    driver.add(3)
    plan = driver.plan()
    assert plan
    assert (plan.step_id, plan.base_step_id) == (42, None)


def test_schedule_writes_one_block_when_a_boundary_is_crossed() -> None:
    driver = CoreDriver(block_size=4)
    request = driver.add(3)
    writes = [driver.step()[0].table_writes for _ in range(6)]
    assert [len(each.row_ids) for each in writes] == [0, 0, 1, 0, 0, 0]
    assert writes[2].start_indexes.tolist() == [1]
    table = driver.core.placement.rows.block_table(request.sequence.row_id)
    assert writes[2].block_ids.tolist() == table.tolist()[1:]


# -- what it holds -----------------------------------------------------------------------------


def test_core_takes_no_memory_of_blocks_when_nobody_used_them() -> None:
    tracemalloc.start()
    try:
        core = EngineWithQueue(make_config(num_device_blocks=2**24, num_host_blocks=2**24))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert core.num_free_blocks == core.num_free_host_blocks == 2**24
    assert peak_bytes < 2**20


# -- aborts ------------------------------------------------------------------------------------


def test_abort_is_reported_once_among_ended_requests() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    driver.core.abort("r1")
    assert driver.core.take_ended().finished == [request]
    assert driver.core.take_ended().finished == []


PREFILL_FIRST = BatchPolicyName.PREFILL_FIRST


@pytest.mark.parametrize(
    ("state", "runs_decodes"),
    [
        (QueueState(True, 0, 0.0, 100.0), True),
        (QueueState(True, 0, 199.0, 100.0), True),
        (QueueState(True, 0, 200.0, 100.0), False),
        (QueueState(False, 0, 200.0, 100.0), True),
        (QueueState(True, 1, 200.0, 100.0), True),
    ],
    ids=str,
)
def test_prefill_first_begins_with_prompts_that_waited_long_enough(
    state: QueueState, runs_decodes: bool
) -> None:
    shapes = PrefillFirst(delay_factor=2.0).shapes(state)
    assert [shape.runs_decodes for shape in shapes] == [runs_decodes, not runs_decodes]


# -- through the core --------------------------------------------------------------------------


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


def test_prefill_first_splits_a_prompt_that_fits_no_step() -> None:
    driver = CoreDriver(batch_policy=PREFILL_FIRST, max_num_batched_tokens=10, prefix_caching=False)
    driver.add(25, "long", max_tokens=1)
    assert [driver.step()[0].num_tokens for _ in range(3)] == [10, 10, 5]


def test_prefill_first_waits_for_prompts_with_a_delay_factor() -> None:
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


URGENT, NORMAL, PATIENT = (SchedulingParams(priority=priority) for priority in (-1, 0, 5))


def decoding_driver(num_decodes: int, policy: str = "priority", **options: object) -> CoreDriver:
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


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_decodes_come_first_when_nobody_is_more_urgent(policy: str) -> None:
    driver = decoding_driver(5, policy)
    driver.add(20, "new", scheduling=URGENT)
    assert [num_tokens_of(driver, "new") for _ in range(3)] == [3, 3, 3]


def test_decodes_come_first_when_they_are_as_urgent() -> None:
    driver = decoding_driver(5)
    driver.add(20, "new", scheduling=PATIENT)
    assert num_tokens_of(driver, "new") == 3


def test_prompt_with_a_deadline_goes_before_decodes_without() -> None:
    driver = decoding_driver(7, "deadline")
    driver.add(16, "soon", scheduling=SchedulingParams(priority=5, deadline_ns=10**9))
    assert [num_tokens_of(driver, "soon") for _ in range(2)] == [8, 8]


def test_urgent_prompt_yields_one_step_in_nine() -> None:
    driver = decoding_driver(7)
    driver.add(150, "urgent", scheduling=URGENT)
    counts = [num_tokens_of(driver, "urgent") for _ in range(2 * (TURN_EVERY + 1))]
    assert counts == ([8] * TURN_EVERY + [1]) * 2


def test_urgent_prompt_ignores_a_turn_of_a_request_without_row() -> None:
    driver = decoding_driver(TURN_EVERY)
    driver.add(1, "turn", scheduling=PATIENT)
    driver.add(16, "urgent", scheduling=URGENT)
    assert [num_tokens_of(driver, "urgent") for _ in range(3)] == [8, 8, 1]


@pytest.mark.parametrize(
    ("params", "num_uncached_tokens", "num_steps"),
    [
        (SamplingParams(max_tokens=10), 1, 1),
        (SamplingParams(max_tokens=10), 0, 1),
        (SamplingParams(max_tokens=10), 16, 2),
        (SamplingParams(max_tokens=10), 17, 3),
        (SamplingParams(max_tokens=10, min_tokens=4), 8, 4),
        (SamplingParams(max_tokens=10, ignore_eos=True), 8, 10),
        (SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=frozenset({3})), 8, 1),
        (SamplingParams(min_tokens=3, ignore_eos=True), 9, 4),
    ],
)
def test_earliest_finish_counts_the_least_number_of_steps(
    params: SamplingParams, num_uncached_tokens: int, num_steps: int
) -> None:
    request = Request.create("r", [1] * 20, params, arrival=1, seed=0)
    finish_ns = earliest_finish_ns(request, 1000, 7, num_uncached_tokens, tokens_per_step=8)
    assert finish_ns == 1000 + 7 * num_steps


def test_earliest_finish_counts_only_what_is_missing_when_resumed() -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True, n=2)
    request = Request.create("r", [1], params, arrival=1, seed=0, resume_token_ids=[[5] * 6, [5]])
    assert earliest_finish_ns(request, 0, 1, 4, tokens_per_step=8) == 9
    request.sequences[1].num_promised = 2
    assert earliest_finish_ns(request, 0, 1, 4, tokens_per_step=8) == 7


def test_earliest_finish_stops_at_the_length_of_the_model() -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    request = Request.create("r", [1] * 4, params, arrival=1, seed=0)
    request.stop_len = 7
    assert earliest_finish_ns(request, 0, 1, 4, tokens_per_step=8) == 3
