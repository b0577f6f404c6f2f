"""Failed steps, failed rows and lost executors cost a recompute of what leaned on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from executor_service.steps.step import RowStatus as ExecutorRowStatus
from executor_service.steps.step import StepInput
from scheduler_service.scheduler.engine.outcomes.losses import MAX_FRUITLESS_LOSSES
from scheduler_service.scheduler.values.config import BatchPolicyName
from scheduler_service.scheduler.values.plan import RowStatus, StepStatus
from scheduler_service.scheduler.values.request import SchedulingParams
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver, names
from tests.support.fakes.fake_runner import StepFault

COMMON = list(range(1, 13))
FAILED_ROW = ExecutorRowStatus.FAILED


def fail_step(step_id: int) -> Callable[[StepInput], StepFault]:
    """A fault that fails one step as a whole."""

    def fault(step: StepInput) -> StepFault:
        return StepFault(RuntimeError("asked for") if step.step_id == step_id else None)

    return fault


# -- a step that was not executed --------------------------------------------------------------


@pytest.mark.parametrize("status", [StepStatus.NEED_SNAPSHOT, StepStatus.REFUSED])
def test_apply_recomputes_from_a_snapshot_when_a_step_was_not_executed(status: StepStatus) -> None:
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


def test_request_ends_with_a_reason_when_its_steps_fail_over_and_over() -> None:
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


def test_losses_do_not_count_when_the_executor_only_wants_a_snapshot() -> None:
    driver = CoreDriver(max_num_batched_tokens=4, prefix_caching=False)
    request = driver.add(9)
    for _ in range(2 * MAX_FRUITLESS_LOSSES):
        driver.plan()
        driver.answer()  # A chunk, which brings no token.
        driver.plan()
        driver.answer(StepStatus.NEED_SNAPSHOT)
    assert request.finish_reason is None
    assert request.sequence.num_output_tokens == 0


def test_snapshot_has_the_token_itself_when_its_row_was_not_in_the_step_that_was_lost() -> None:
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


def test_requests_lose_nothing_when_somebody_elses_step_failed() -> None:
    driver = CoreDriver(prefix_caching=False, max_num_batched_tokens=4)
    driver.add(3, "old", max_tokens=2)
    driver.plan()
    driver.plan()  # All that the old one needs.
    driver.add(4, "new")
    driver.plan()
    for status in (StepStatus.OK, StepStatus.OK, StepStatus.FAILED):
        driver.answer(status)
    assert driver.next_rows() == [("new", 0, 4)]


def test_apply_sends_tokens_again_when_a_row_that_was_not_in_the_lost_step_goes_on() -> None:
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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_are_computed_again_when_the_step_that_filled_them_failed(depth: int) -> None:
    engine = CheckedEngine(depth=depth, fault=fail_step(1))
    engine.add([*COMMON, 50], max_tokens=3)
    engine.engine.fill()
    engine.add([*COMMON, 60], max_tokens=3)
    engine.run(has_faults=True)


def test_blocks_are_not_findable_when_the_step_that_was_to_fill_them_failed() -> None:
    driver = CoreDriver()
    driver.add(13, "first")
    driver.plan()
    driver.core.abort("first")
    driver.answer(StepStatus.FAILED)
    driver.add(13, "second")
    assert driver.next_rows() == [("second", 0, 13)]


def test_blocks_are_not_findable_when_the_row_that_was_to_fill_them_failed() -> None:
    driver = CoreDriver()
    driver.add(13, "first")
    driver.plan()
    driver.answer(row_statuses=[RowStatus.FAILED], token_ids=[-1])
    driver.add(13, "second")
    assert driver.next_rows() == [("second", 0, 13)]


@pytest.mark.parametrize("joins_later", [False, True])
def test_others_are_computed_again_when_the_row_they_leaned_on_failed(joins_later: bool) -> None:
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


def test_others_are_computed_again_when_what_they_read_came_from_a_failed_reader() -> None:
    driver = CoreDriver(max_num_batched_tokens=40)
    driver.add(COMMON[:5], "writer", max_tokens=9)
    driver.add([*COMMON, 50], "reader", max_tokens=9)  # Leans on the writer, fills two more.
    driver.add([*COMMON, 60], "third", max_tokens=9)  # Leans on both.
    assert driver.next_rows() == [("writer", 0, 5), ("reader", 4, 9), ("third", 12, 1)]
    statuses = [RowStatus.FAILED, RowStatus.OK, RowStatus.OK]
    driver.answer(row_statuses=statuses, token_ids=[-1, 5, 5])
    assert driver.next_rows() == [("reader", 0, 13), ("third", 12, 1)]


def test_tokens_of_a_row_are_dropped_when_it_leaned_on_one_that_failed() -> None:
    driver = CoreDriver()
    driver.add([*COMMON, 50], "writer")
    driver.add([*COMMON, 60], "reader")
    driver.plan()
    events = driver.answer(row_statuses=[RowStatus.FAILED, RowStatus.OK], token_ids=[-1, 5])
    assert events.client_keys.tolist() == []
    assert driver.next_rows() == [("reader", 0, 13)]


@pytest.mark.parametrize(("window", "depth"), [(2, 2), (2, 3), (4, 3)])
def test_others_get_their_tokens_when_a_failed_block_is_behind_their_window(
    window: int, depth: int
) -> None:
    def fault(step: StepInput) -> StepFault:
        fails = step.step_id == 1
        return StepFault(rows={int(step.row_ids[0]): FAILED_ROW} if fails else {})

    engine = CheckedEngine(block_size=1, sliding_window=window, depth=depth, fault=fault)
    engine.add([*COMMON[:8], 50], "writer", max_tokens=8)
    reader = engine.add([*COMMON[:8], *range(60, 90)], "reader", max_tokens=8)
    engine.drain()
    engine.check_tokens(reader)


@pytest.mark.parametrize("status", [pb.STEP_STATUS_NEED_SNAPSHOT, pb.STEP_STATUS_REFUSED])
def test_requests_get_their_tokens_when_steps_are_not_executed(status: pb.StepStatus) -> None:
    engine = CheckedEngine(depth=2)
    for start in (1, 40):
        engine.add(list(range(start, start + 9)), max_tokens=12, n=2)
    for _ in range(4):
        engine.step(3)
        engine.engine.fill()
        while engine.engine.in_flight:
            engine.engine.skip(status)
    engine.run()
