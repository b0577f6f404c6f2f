"""Parts of results: tokens that a step in flight has brought before its result."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.scheduler.engine.outcomes import Results
from scheduler_service.scheduler.values import (
    ContractBroken,
    Feature,
    FinishReason,
    Request,
    RowStatus,
    StepEvents,
    StepPart,
    StepStatus,
)
from tests.support.core.driver import CoreDriver, make_config

FEATURES = make_config().features | {Feature.SEVERAL_TOKENS, Feature.PARTIAL_RESULTS}
STOP = 42


def running_driver(*prompts: int, **options: object) -> tuple[CoreDriver, list[Request]]:
    """Requests with two tokens each, and a run of theirs in flight; a pass takes 1 ms."""
    values: dict[str, object] = {"features": FEATURES, "max_run_ahead": 8}
    driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
    requests = [
        driver.add(prompt, max_tokens=30, stop_token_ids=frozenset({STOP})) for prompt in prompts
    ]
    for _ in range(2):
        driver.plan()
        driver.answer(compute_us=1000)
    plan = driver.plan()
    assert plan is not None
    assert plan.work.reports_parts
    return driver, requests


def tokens_of(driver: CoreDriver, request: Request) -> list[int]:
    """Output tokens, without the two that came before the run."""
    sequence = request.sequence
    known: list[int] = driver.core.placement.known_tokens(sequence).tolist()
    return known[sequence.num_prompt_tokens + 2 :]


def keyed(events: StepEvents) -> list[tuple[int, int]]:
    return list(zip(events.client_keys.tolist(), events.token_ids.tolist(), strict=True))


def test_run_asks_for_no_parts_when_the_executor_cannot_report_them() -> None:
    features = FEATURES - {Feature.PARTIAL_RESULTS}
    driver = CoreDriver(features=features, max_run_ahead=8)
    driver.add(3, max_tokens=30)
    for _ in range(2):
        driver.plan()
        driver.answer(compute_us=1000)
    plan = driver.plan()
    assert plan is not None
    assert plan.work.num_run_on_tokens is not None
    assert not plan.work.reports_parts


def test_tokens_reach_clients_once_when_parts_come_before_the_result() -> None:
    driver, (one, two) = running_driver(3, 5)
    assert keyed(driver.report([5], [6])) == [(1, 5), (2, 6)]
    assert keyed(driver.report([7, 8], [])) == [(1, 7), (1, 8)]
    assert keyed(driver.answer(runs=[[5, 7, 8], [6, 9]])) == [(2, 9)]
    assert tokens_of(driver, one) == [5, 7, 8]
    assert tokens_of(driver, two) == [6, 9]


def test_next_step_waits_for_the_result_when_there_is_no_other_work() -> None:
    driver, _ = running_driver(3)
    assert driver.plan() is None
    driver.report([5])
    assert driver.plan() is None
    driver.answer(runs=[[5, 6]])
    assert driver.plan() is not None


def test_next_step_is_planned_when_a_request_arrives() -> None:
    driver, _ = running_driver(3)
    driver.add(4, max_tokens=5)
    plan = driver.plan()
    assert plan is not None
    assert len(plan.work.row_ids) == 2
    driver.report([5])
    # The run ended early: the rows of the next step begin where it did.
    driver.answer(runs=[[5, 6]])
    assert plan.work.num_computed_tokens.tolist() == [3 + 2 + 2 - 1, 0]


def test_next_step_is_planned_when_a_run_has_one_token_left() -> None:
    driver, _ = running_driver(3, max_run_ahead=4)
    driver.report([5, 6])
    assert driver.plan() is None
    driver.report([7])
    plan = driver.plan()
    assert plan is not None
    driver.answer(runs=[[5, 6, 7, 8]])
    assert plan.work.num_computed_tokens.tolist() == [3 + 2 + 4 - 1]


def test_run_gets_all_of_its_time_behind_another_step() -> None:
    driver, _ = running_driver(3, max_run_ahead_ms=6)
    driver.report([5, 6, 7, 8, 9])
    plan = driver.plan()
    assert plan is not None
    assert plan.work.num_run_on_tokens is not None
    assert plan.work.num_run_on_tokens.tolist() == [5]


@pytest.mark.parametrize("last", [STOP, 9])
def test_sequence_ends_with_the_part_that_has_its_last_token(last: int) -> None:
    driver, (request,) = running_driver(3, max_run_ahead=40)
    run = [5] * 27 + [last]
    driver.report(run[:1])
    events = driver.report([5, STOP]) if last == STOP else driver.report(run[1:])
    assert events.finished == [request]
    assert request.finish_reason is (FinishReason.STOP if last == STOP else FinishReason.LENGTH)
    # The step in flight may still write to its blocks.
    assert driver.core.num_free_blocks < driver.config.num_device_blocks
    events = driver.answer(runs=[[5, 5, STOP] if last == STOP else run])
    assert not len(events.token_ids)
    assert not events.finished
    assert driver.core.num_free_blocks == driver.config.num_device_blocks


@pytest.mark.parametrize("run", [[], [5], [5, 7, 8], [7, 6]])
def test_row_fails_when_its_result_does_not_begin_with_its_parts(run: list[int]) -> None:
    driver, (one, two) = running_driver(3, 5)
    driver.report([5], [6])
    driver.report([6], [])
    events = driver.answer(runs=[run, [6, 7]])
    assert events.finished == [one]
    assert one.error is not None
    assert one.error[0] == "ROW_FAILED"
    assert "executor broke the step contract" in one.error[1]
    assert keyed(events) == [(2, 7)]
    assert not two.is_finished


@pytest.mark.parametrize("status", [RowStatus.NOT_SAMPLED, RowStatus.GRAMMAR_INVALID])
def test_row_fails_when_it_was_told_and_then_not_sampled(status: RowStatus) -> None:
    driver, (request,) = running_driver(3)
    driver.report([5])
    driver.answer(runs=[[]], row_statuses=[status])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


@pytest.mark.parametrize(
    "status", [StepStatus.FAILED, StepStatus.REFUSED, StepStatus.NEED_SNAPSHOT]
)
def test_told_tokens_stay_when_the_step_is_lost(status: StepStatus) -> None:
    driver, (request,) = running_driver(3)
    driver.report([5, 6])
    assert not len(driver.answer(status).token_ids)
    assert tokens_of(driver, request) == [5, 6]
    # They are recomputed, and not sampled again.
    plan = driver.plan()
    assert plan is not None
    assert plan.work.token_ids.tolist()[-2:] == [5, 6]


def test_told_tokens_go_along_when_the_executor_is_lost() -> None:
    driver, (request,) = running_driver(3)
    driver.report([5, 6])
    (moved,) = driver.core.evacuate()
    assert moved.request_id == request.request_id
    assert moved.sequence.token_ids[moved.sequence.num_prompt_tokens + 2 :].tolist() == [5, 6]


def test_rest_of_the_run_counts_when_the_row_is_preempted_behind_a_part() -> None:
    driver, (request,) = running_driver(3)
    driver.report([5])
    driver.preempt(request)
    driver.report([6])
    events = driver.answer(runs=[[5, 6, 7]])
    assert [event.token_id for event in events.tokens] == [6, 7]
    assert tokens_of(driver, request) == [5, 6, 7]
    assert request.sequence.num_promised == 0


def test_rows_of_one_request_wait_for_the_result() -> None:
    driver = CoreDriver(features=FEATURES, max_run_ahead=8)
    driver.add(3, max_tokens=30, n=2)
    for _ in range(4):
        driver.plan()
        driver.answer(compute_us=1000)
    plan = driver.plan()
    assert plan is not None
    assert plan.work.reports_parts
    events = driver.report([5], [6])
    assert not len(events.token_ids)
    assert not events.tokens
    events = driver.answer(runs=[[5], [6, 7]])
    assert [event.token_id for event in events.tokens] == [5, 6, 7]


@pytest.mark.parametrize("told", [[-1], [100_000], [STOP, 5]])
def test_tokens_that_no_result_may_have_are_not_believed(told: list[int]) -> None:
    driver, (request,) = running_driver(3)
    assert not len(driver.report(told).token_ids)
    assert not len(driver.report([6]).token_ids)
    driver.answer(runs=[[*told, 6]])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"


def test_filled_blocks_are_found_at_once_and_published_once() -> None:
    driver, _ = running_driver(3, block_size=4, max_run_ahead=16)
    published: list[int] = []
    publish = BlockPool.publish

    def note(pool: BlockPool, block_id: int, block_hash: bytes) -> bool:
        published.append(block_id)
        return publish(pool, block_id, block_hash)

    num_before = driver.core.num_cached_blocks
    with mock.patch.object(BlockPool, "publish", note):
        # 4 tokens are computed, the fifth is the input of the step.
        driver.report([5, 6, 7])
        assert driver.core.num_cached_blocks == num_before
        driver.report([8])
        assert driver.core.num_cached_blocks == num_before + 1
        driver.answer(runs=[[5, 6, 7, 8, 9, 5, 6, 7, 8]])
    assert driver.core.num_cached_blocks == num_before + 2
    assert len(set(published)) == len(published) == 2


def test_tokens_of_a_part_are_charged_once_when_the_policy_charges() -> None:
    driver, _ = running_driver(3, queue_policy="fair")
    assert driver.report([5, 6]).num_sampled == {"": 2}
    assert driver.answer(runs=[[5, 6, 7]]).num_sampled == {"": 1}


def test_tokens_of_the_last_part_are_taken_back_when_it_cannot_be_applied() -> None:
    driver, (request,) = running_driver(3)
    driver.report([5])
    take_part = Results.take_part

    def take_and_break(*arguments: object) -> None:
        take_part(*arguments)  # type: ignore[arg-type]
        raise AssertionError("a fault of ours")

    with (
        mock.patch.object(Results, "take_part", take_and_break),
        pytest.raises(AssertionError, match="a fault of ours"),
    ):
        driver.report([6])
    assert tokens_of(driver, request) == [5]


def test_contract_is_broken_when_a_part_does_not_fit_its_step() -> None:
    driver, (request,) = running_driver(3, max_run_ahead=4)
    one = np.ones(1, np.int32)
    step_id = driver.in_flight[0].step_id
    wrong = [
        (StepPart(step_id + 1, one, one), "unexpected part"),
        (StepPart(step_id, np.ones(2, np.int32), np.ones(2, np.int32)), "2 tokens of 2 rows"),
        (StepPart(step_id, one, one[:0]), "received: 0 of 1"),
        (StepPart(step_id, 5 * one, np.ones(5, np.int32)), "allowed: at most 4"),
    ]
    for part, problem in wrong:
        with pytest.raises(ContractBroken, match=problem):
            driver.core.take_part(part)
    assert tokens_of(driver, request) == []
    assert keyed(driver.report([5])) == [(1, 5)]


def test_part_is_refused_when_the_step_was_to_report_none() -> None:
    driver = CoreDriver(features=FEATURES)
    driver.add(3, max_tokens=30)
    driver.plan()
    with pytest.raises(ContractBroken, match="has no parts"):
        driver.report([5])


def test_part_is_ignored_when_its_step_was_answered() -> None:
    driver, (request,) = running_driver(3)
    step_id = driver.in_flight[0].step_id
    driver.answer(runs=[[5]])
    one = np.ones(1, np.int32)
    assert not len(driver.core.take_part(StepPart(step_id, one, one)).token_ids)
    assert tokens_of(driver, request) == [5]
