"""Failed steps and rows, lost executors: what is recomputed, and where requests go on."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine import SequenceEndings
from scheduler_service.scheduler.engine.outcomes import MAX_FRUITLESS_LOSSES
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    FinishReason,
    PreemptionMode,
    RowStatus,
    SchedulingParams,
    StepStatus,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import CoreDriver, names
from tests.support.core.in_process import CheckedEngine
from tests.support.core.pure_fleet import Broken

COMMON = list(range(1, 13))


# -- a step that was not executed --------------------------------------------------------------


@pytest.mark.parametrize("status", [StepStatus.NEED_SNAPSHOT, StepStatus.REFUSED])
def test_apply_recomputes_from_a_snapshot_after_an_unexecuted_step(status: StepStatus) -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.step()
    driver.plan()
    driver.plan()
    driver.answer(status)
    assert driver.plan() is None, "steps under way are answered first"
    driver.answer(status)
    plan = driver.plan()
    assert plan
    assert plan.base_step_id is None
    assert driver.rows_of(plan) == [("r1", 0, 4)]
    assert plan.work.token_ids.tolist() == [1, 2, 3, 7]


def test_apply_recomputes_without_a_snapshot_when_a_step_failed() -> None:
    driver = CoreDriver()
    driver.add(3)
    driver.step()
    driver.plan()
    driver.answer(StepStatus.FAILED)
    plan = driver.plan()
    assert plan
    assert plan.base_step_id == 2
    assert driver.rows_of(plan) == [("r1", 0, 4)]


def test_request_ends_with_an_error_when_its_steps_keep_failing() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    for _ in range(MAX_FRUITLESS_LOSSES):
        assert request.finish_reason is None
        driver.plan()
        driver.answer(StepStatus.FAILED)
    assert request.error
    assert request.error[0] == "EXECUTOR_LOST_REPEATEDLY"
    assert driver.core.num_free_blocks == 64


def test_losses_are_forgiven_when_a_token_comes_in_between() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    for _ in range(3 * MAX_FRUITLESS_LOSSES):
        driver.plan()
        driver.answer(StepStatus.FAILED)
        driver.step()
    assert request.finish_reason is None


def test_losses_do_not_count_when_a_snapshot_is_wanted() -> None:
    driver = CoreDriver(max_num_batched_tokens=4, prefix_caching=False)
    request = driver.add(9)
    for _ in range(2 * MAX_FRUITLESS_LOSSES):
        driver.plan()
        driver.answer()  # A chunk, which brings no token.
        driver.plan()
        driver.answer(StepStatus.NEED_SNAPSHOT)
    assert request.finish_reason is None
    assert request.sequence.num_output_tokens == 0


def test_snapshot_has_the_token_of_a_row_outside_the_lost_step() -> None:
    driver = CoreDriver(queue_policy="priority", max_num_batched_tokens=4)
    driver.add(2, "patient")
    driver.step()
    driver.add(4, "urgent", scheduling=SchedulingParams(priority=-1))
    assert names(driver.next_rows()) == ["urgent"]
    driver.answer(StepStatus.NEED_SNAPSHOT)
    driver.core.abort("urgent")
    plan = driver.plan()
    assert plan is not None
    assert plan.base_step_id is None
    assert driver.rows_of(plan) == [("patient", 2, 1)]
    assert plan.work.sampled_steps_back.tolist() == [0]


def test_apply_resends_tokens_of_rows_outside_the_lost_step() -> None:
    driver = CoreDriver(batch_policy=BatchPolicyName.PREFILL_FIRST, prefix_caching=False)
    driver.add(3, "old")
    driver.step()
    driver.add(3, "new")
    driver.plan()
    driver.answer(StepStatus.REFUSED)
    driver.step()
    plan = driver.plan()
    assert plan
    assert driver.rows_of(plan) == [("old", 3, 1), ("new", 3, 1)]
    assert plan.work.sampled_steps_back.tolist() == [0, 1]
    assert plan.work.token_ids.tolist() == [7]


# -- what leans on a failure -------------------------------------------------------------------


@pytest.mark.parametrize("is_whole_step", [True, False])
def test_blocks_are_not_findable_when_the_step_or_row_failed(is_whole_step: bool) -> None:
    driver = CoreDriver()
    driver.add(13, "first")
    driver.plan()
    if is_whole_step:
        driver.core.abort("first")
        driver.answer(StepStatus.FAILED)
    else:
        driver.answer(row_statuses=[RowStatus.FAILED], token_ids=[-1])
    driver.add(13, "second")
    assert driver.next_rows() == [("second", 0, 13)]


@pytest.mark.parametrize("joins_later", [False, True])
def test_readers_are_recomputed_when_the_row_they_read_failed(joins_later: bool) -> None:
    driver = CoreDriver()
    driver.add([*COMMON, 50], "writer")
    if joins_later:
        assert driver.next_rows() == [("writer", 0, 13)]
    driver.add([*COMMON, 60], "reader")
    driver.add([70, *COMMON], "stranger")
    assert ("reader", 12, 1) in driver.next_rows()
    statuses = [RowStatus.FAILED] + [RowStatus.OK] * 2 * (not joins_later)
    driver.answer(row_statuses=statuses, token_ids=[-1, 5, 5][: len(statuses)])
    if joins_later:
        driver.answer()
    assert ("reader", 0, 13) in driver.next_rows()
    assert ("stranger", 13, 1) in driver.rows_of(driver.in_flight[-1])


def test_readers_are_recomputed_when_a_failed_reader_wrote_for_them() -> None:
    driver = CoreDriver(max_num_batched_tokens=40)
    driver.add(COMMON[:5], "writer", max_tokens=9)
    driver.add([*COMMON, 50], "reader", max_tokens=9)  # Leans on the writer, fills two more.
    driver.add([*COMMON, 60], "third", max_tokens=9)  # Leans on both.
    assert driver.next_rows() == [("writer", 0, 5), ("reader", 4, 9), ("third", 12, 1)]
    statuses = [RowStatus.FAILED, RowStatus.OK, RowStatus.OK]
    driver.answer(row_statuses=statuses, token_ids=[-1, 5, 5])
    assert driver.next_rows() == [("reader", 0, 13), ("third", 12, 1)]


def test_request_is_recomputed_when_its_swap_out_fails_after_its_return() -> None:
    driver = CoreDriver(
        num_host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=False
    )
    driver.add(9, "running")
    swapped = driver.add(9, "swapped")
    driver.step()
    driver.preempt(swapped)
    out, back = driver.plan(), driver.plan()
    assert out
    assert back
    assert [to for _, to in out.moves.swap_out] == [source for source, _ in back.moves.swap_in]
    driver.answer(StepStatus.FAILED)
    assert driver.answer().client_keys.tolist() == []
    assert driver.next_rows() == [("running", 0, 10), ("swapped", 0, 10)]


def test_request_is_recomputed_when_its_swap_in_fails_after_a_swap_out() -> None:
    driver = CoreDriver(
        num_host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=False
    )
    request = driver.add(7)
    driver.step()
    driver.step()
    driver.preempt(request)
    driver.step()
    back = driver.plan()
    assert back
    assert back.moves.swap_in
    driver.preempt(request)
    out = driver.plan()
    assert out
    assert [to for _, to in back.moves.swap_in] == [source for source, _ in out.moves.swap_out]
    driver.answer(StepStatus.FAILED)
    driver.answer()
    assert driver.next_rows() == [("r1", 0, 9)]


def test_blocks_of_a_fork_are_not_findable_after_a_failed_copy() -> None:
    driver = CoreDriver(batch_policy=BatchPolicyName.PREFILL_FIRST)
    driver.add(2, n=2, resume=[[10], [20, 21, 22]])
    driver.plan()
    driver.add(1)
    forked = driver.plan()
    assert forked
    assert forked.moves.copy
    assert driver.rows_of(forked) == [("r1", 2, 3), ("r2", 0, 1)]
    assert driver.core.num_cached_blocks == 1
    driver.answer(StepStatus.FAILED)
    assert driver.core.num_cached_blocks == 0


def test_evicted_blocks_are_not_findable_when_their_copy_never_ran() -> None:
    engine = CheckedEngine(num_device_blocks=4, num_host_blocks=8)
    engine.add([*COMMON, 50], max_tokens=1)
    engine.run()
    engine.add(list(range(40, 53)), max_tokens=1)
    engine.engine.fill()
    assert engine.engine.in_flight[0][0].moves.swap_out
    engine.engine.skip(pb.STEP_STATUS_REFUSED)
    engine.run(has_faults=True)
    again = engine.add([*COMMON, 50], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0


# -- rows of one step ---------------------------------------------------------------------------


def test_row_is_recomputed_when_it_failed_for_what_it_read() -> None:
    driver = CoreDriver()
    writer = driver.add([*COMMON, 50], "writer")
    reader = driver.add([*COMMON, 60], "reader")
    driver.plan()
    statuses = [RowStatus.FAILED, RowStatus.INVALID_LOGITS]
    assert driver.answer(row_statuses=statuses, token_ids=[-1, -1]).finished == [writer]
    assert reader.error is None
    assert driver.next_rows() == [("reader", 0, 13)]


def test_rows_both_end_when_they_fail_without_sharing_new_blocks() -> None:
    driver = CoreDriver()
    requests = [driver.add([*COMMON, number], f"r{number}") for number in (50, 60)]
    driver.step()
    driver.plan()
    statuses = [RowStatus.FAILED, RowStatus.INVALID_LOGITS]
    driver.answer(row_statuses=statuses, token_ids=[-1, -1])
    assert [request.finish_reason for request in requests] == [FinishReason.ERROR] * 2


def test_evacuate_returns_requests_with_their_tokens() -> None:
    driver, other = CoreDriver(), CoreDriver(num_device_blocks=16)
    driver.add(3, max_tokens=6)
    driver.add(5, max_tokens=6)
    driver.step()
    driver.plan()
    moved = driver.core.evacuate()
    assert [request.sequence.num_output_tokens for request in moved] == [1, 1]
    for request in moved:
        other.core.readmit(request)
    other.run(depth=2)
    assert [request.sequence.num_output_tokens for request in moved] == [6, 6]
    assert other.core.num_free_blocks == 16


def test_evacuate_takes_back_tokens_of_an_untaken_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = CoreDriver()
    preempted = [driver.add(3), driver.add(3)]
    driver.plan()
    for request in preempted:
        driver.preempt(request)
    Broken(monkeypatch, SequenceEndings, "finish_if_stopped").at_call = 2
    with pytest.raises(AssertionError):
        driver.answer(token_ids=[5, 6])
    moved = driver.core.evacuate()
    assert [request.sequence.num_output_tokens for request in moved] == [0, 0]


def test_evacuate_names_those_in_flight_when_the_executor_is_lost() -> None:
    driver = CoreDriver(max_num_seqs=2)
    for name in ("in flight", "answered", "waiting"):
        driver.add(3, name, max_tokens=1 + (name == "in flight"))
    driver.step()
    driver.add(3, "arrived")
    driver.core.abort("waiting")
    driver.plan()
    driver.add(3, "late")
    in_flight = {r.request_id: r.was_in_flight for r in driver.core.evacuate()}
    assert in_flight == {"in flight": True, "arrived": True, "late": False}


def test_evacuate_names_nobody_when_no_step_is_in_flight() -> None:
    driver = CoreDriver()
    request = driver.add(3)
    driver.plan()
    (request,) = driver.core.evacuate()
    assert request.was_in_flight
    driver = CoreDriver()
    driver.core.readmit(request)
    (request,) = driver.core.evacuate()
    assert not request.was_in_flight
