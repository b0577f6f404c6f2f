"""The scheduler core: what a step is made of, pipelining, snapshots, aborts."""

from __future__ import annotations

import tracemalloc

import pytest

from scheduler_service.scheduler.values.config import BatchPolicyName
from scheduler_service.scheduler.values.request import FinishReason, SequenceStatus
from tests.support.core.driver import EOS, CoreDriver, make_config
from tests.support.core.engine_with_queue import EngineWithQueue


def waiting(status: SequenceStatus) -> bool:
    return status is SequenceStatus.WAITING


# -- what a step is made of --------------------------------------------------------------------


def test_schedule_returns_none_when_nothing_waits() -> None:
    assert CoreDriver().plan() is None


def test_schedule_puts_decodes_first_then_prefills_then_waiting_when_budget_is_short() -> None:
    driver = CoreDriver(max_num_batched_tokens=10, prefix_caching=False)
    driver.add(4, "decoding")
    driver.step()
    driver.add(15, "prefilling")
    driver.step()
    driver.add(10, "waiting")
    assert driver.next_rows() == [("decoding", 5, 1), ("prefilling", 9, 6), ("waiting", 0, 3)]


def test_schedule_samples_only_when_the_last_token_is_computed() -> None:
    driver = CoreDriver(max_num_batched_tokens=4)
    driver.add(6)
    first, second, third = (driver.step()[0].work.samples for _ in range(3))
    assert first is not None
    assert first.tolist() == [False]
    assert second is third is None  # All rows sample.


def test_schedule_admits_no_more_than_max_num_seqs_when_more_wait() -> None:
    driver = CoreDriver(max_num_seqs=2)
    for _ in range(3):
        driver.add(2)
    assert [row[0] for row in driver.next_rows()] == ["r1", "r2"]
    assert driver.core.num_waiting == 1


def test_schedule_counts_sequences_not_requests_when_a_request_has_several() -> None:
    driver = CoreDriver(max_num_seqs=4)
    driver.add(2, n=3)
    driver.add(2, n=2)
    driver.add(2)
    assert [row[0] for row in driver.next_rows()] == ["r1"]
    assert driver.core.num_waiting == 2


def test_schedule_exceeds_no_token_budget_when_every_row_has_something_to_do() -> None:
    driver = CoreDriver(max_num_batched_tokens=7, prefix_caching=False)
    for length in (9, 5, 3, 8):
        driver.add(length, max_tokens=6)
    while (plan := driver.plan()) is not None:
        assert 0 < plan.num_tokens <= 7
        driver.answer()


def test_schedule_plans_no_tokens_twice_when_a_step_is_in_flight() -> None:
    driver = CoreDriver(max_num_batched_tokens=4)
    driver.add(11)
    assert [driver.next_rows() for _ in range(3)] == [
        [("r1", 0, 4)],
        [("r1", 4, 4)],
        [("r1", 8, 3)],
    ]


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


def test_schedule_refers_further_back_when_a_step_left_the_row_out() -> None:
    driver = CoreDriver(batch_policy=BatchPolicyName.PREFILL_FIRST, prefix_caching=False)
    driver.add(3, "old")
    assert driver.plan()
    driver.add(3, "new")
    assert driver.next_rows() == [("new", 0, 3)]
    plan = driver.plan()
    assert plan
    assert plan.work.sampled_steps_back.tolist() == [2, 1]


def test_schedule_plans_nothing_beyond_max_tokens_when_pipelined() -> None:
    driver = CoreDriver()
    request = driver.add(3, max_tokens=2)
    assert driver.plan()
    assert driver.plan()
    assert driver.plan() is None
    driver.answer()
    driver.answer()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.sequence.num_output_tokens == 2


# -- snapshots and deltas ----------------------------------------------------------------------


def test_schedule_sends_a_snapshot_only_when_it_is_the_first() -> None:
    driver = CoreDriver()
    driver.add(3)
    plans = [driver.step()[0] for _ in range(3)]
    assert [plan.base_step_id for plan in plans] == [None, 1, 2]
    assert [len(plan.new_rows) for plan in plans] == [1, 0, 0]


def test_schedule_numbers_steps_on_when_the_executor_was_sent_some_before() -> None:
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


def test_schedule_removes_a_row_when_its_request_has_ended() -> None:
    driver = CoreDriver()
    driver.add(3, max_tokens=1)
    first = driver.step()[0]
    driver.add(3)
    assert list(driver.step()[0].removed_row_ids) == [first.new_rows[0].row_id]


# -- what it holds -----------------------------------------------------------------------------


def test_num_unfinished_tokens_counts_waiting_and_running_when_both_exist() -> None:
    driver = CoreDriver(max_num_seqs=1)
    driver.add(5)
    driver.add(7)
    assert driver.core.num_unfinished_tokens == 12
    driver.step()
    assert driver.core.num_unfinished_tokens == 13
    assert (driver.core.num_running, driver.core.num_waiting) == (1, 1)


def test_num_unfinished_tokens_is_zero_when_all_have_ended() -> None:
    driver = CoreDriver(num_device_blocks=8, num_host_blocks=4)
    for _ in range(4):
        driver.add(7, n=2, max_tokens=8)
    driver.run(depth=2)
    assert driver.core.num_unfinished_tokens == 0


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


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "in_flight", "preempted"])
def test_abort_frees_everything_when_the_request_is(state: str) -> None:
    driver = CoreDriver(num_device_blocks=4, max_num_batched_tokens=6, prefix_caching=False)
    if state == "preempted":
        driver.add(7, "older")
    request = driver.add(7, "doomed", max_tokens=8)
    if state in ("prefilling", "decoding", "in_flight"):
        driver.step()
    if state in ("decoding", "in_flight"):
        driver.step()
    if state == "in_flight":
        driver.plan()
    if state == "preempted":
        while request.num_preemptions == 0 or not waiting(request.sequence.status):
            driver.step()
    assert driver.core.abort("doomed") is request
    assert driver.core.abort("doomed") is None
    while driver.in_flight:
        assert driver.answer().client_keys.tolist() == []
    driver.core.abort("older")
    assert request.finish_reason is FinishReason.ABORTED
    assert driver.core.num_free_blocks == 4
    assert driver.plan() is None


def test_abort_is_told_to_the_owner_when_ended_requests_are_taken() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    driver.core.abort("r1")
    assert driver.core.take_ended().finished == [request]
    assert driver.core.take_ended().finished == []


def test_schedule_uses_blocks_again_only_when_the_step_that_writes_them_is_answered() -> None:
    driver = CoreDriver(sample=lambda: EOS)
    driver.add(3)
    driver.plan()
    driver.plan()
    driver.answer()
    assert driver.core.num_free_blocks == 63
    driver.answer()
    assert driver.core.num_free_blocks == 64
