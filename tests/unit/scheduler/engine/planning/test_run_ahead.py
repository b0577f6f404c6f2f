"""How many tokens rows may get in one step, and what becomes of those that do not come."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.config import Feature
from scheduler_service.scheduler.values.plan import RowStatus, StepPlan
from scheduler_service.scheduler.values.request import FinishReason, Request
from tests.support.core.driver import CoreDriver, make_config

FEATURES = make_config().features | {Feature.SEVERAL_TOKENS}
STOP = 42


def running_driver(*prompts: int, **options: object) -> tuple[CoreDriver, list[Request]]:
    """Requests that have their first token; a turn takes 1 ms, and nothing is in flight."""
    values: dict[str, object] = {"features": FEATURES, "max_run_ahead": 8}
    driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
    requests = [
        driver.add(prompt, max_tokens=30, stop_token_ids=frozenset({STOP})) for prompt in prompts
    ]
    driver.plan()
    driver.answer(compute_us=1000)
    driver.plan()
    driver.answer(compute_us=1000)
    return driver, requests


def num_run_on(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    columns = plan.work.num_run_on_tokens
    return [0] * len(plan.work.row_ids) if columns is None else columns.tolist()


def test_rows_may_get_as_many_as_is_configured_when_nobody_waits() -> None:
    driver, _ = running_driver(3, 5)
    assert num_run_on(driver.plan()) == [7, 7]


def test_rows_get_one_token_until_it_is_known_what_a_turn_takes() -> None:
    driver = CoreDriver(features=FEATURES, max_run_ahead=8)
    driver.add(3, max_tokens=30)
    for _ in range(3):
        assert num_run_on(driver.plan()) == [0]
        driver.answer()


def test_rows_get_no_more_than_there_is_time_for() -> None:
    driver, _ = running_driver(3, max_run_ahead_ms=5)
    assert num_run_on(driver.plan()) == [4]


def test_rows_get_half_of_the_time_behind_another_step() -> None:
    driver, _ = running_driver(3, max_run_ahead_ms=6)
    assert num_run_on(driver.plan()) == [5]
    assert num_run_on(driver.plan()) == [2]


def test_time_of_a_turn_is_known_by_the_clock_when_the_executor_tells_none() -> None:
    driver = CoreDriver(features=FEATURES, max_run_ahead=8, max_run_ahead_ms=5)
    driver.add(3, max_tokens=30)
    for number in range(1, 3):
        assert num_run_on(driver.plan()) == [0]
        driver.core.tick(number * 10**6)
        driver.answer()
    assert num_run_on(driver.plan()) == [4]


def test_rows_get_no_more_than_their_sequences_may_have() -> None:
    driver = CoreDriver(features=FEATURES, max_run_ahead=8)
    driver.add(3, max_tokens=5)
    for _ in range(2):
        driver.plan()
        driver.answer(compute_us=1000)
    # It has 2 tokens.
    assert num_run_on(driver.plan()) == [2]
    assert driver.plan() is None
    driver.answer(runs=[[5, 6, 7]])
    assert driver.core.num_unfinished == 0


@pytest.mark.parametrize(
    "options",
    [
        {"features": make_config().features},
        {"max_run_ahead": 1},
        {"max_run_ahead_ms": 0},
    ],
)
def test_rows_get_one_token_when_they_may_have_no_more(options: dict[str, object]) -> None:
    driver, _ = running_driver(3, **options)
    assert num_run_on(driver.plan()) == [0]


def test_rows_get_one_token_while_somebody_waits() -> None:
    driver, _ = running_driver(3, max_num_seqs=1)
    driver.add(4)
    assert num_run_on(driver.plan()) == [0]


def test_rows_get_one_token_beside_a_prompt() -> None:
    driver, _ = running_driver(3)
    driver.add(20)
    assert num_run_on(driver.plan()) == [0, 0]


def test_an_eighth_of_the_blocks_stays_free_when_rows_run_ahead() -> None:
    driver, _ = running_driver(3, 3, num_device_blocks=16, max_run_ahead=60)
    # Both together want 18 blocks to the end; the less urgent one gets what is left.
    assert num_run_on(driver.plan()) == [27, (16 - 2 - 9) * 4 - 4 - 1]
    assert driver.core.num_free_blocks == 16 // 8


def test_steps_behind_are_where_they_were_thought_to_be_when_all_tokens_come() -> None:
    driver, (request,) = running_driver(3)
    driver.plan()
    second = driver.plan()
    assert second is not None
    assert second.work.num_computed_tokens.tolist() == [3 + 1 + 8]
    events = driver.answer(runs=[list(range(1, 9))])
    assert events.token_ids.tolist() == list(range(1, 9))
    assert events.client_keys.tolist() == [request.client_key] * 8
    assert second.work.num_computed_tokens.tolist() == [3 + 1 + 8]


def test_steps_behind_begin_earlier_when_fewer_tokens_come() -> None:
    driver, (request,) = running_driver(3)
    driver.plan()
    second = driver.plan()
    assert second is not None
    driver.answer(runs=[[1, 2, 3]])
    # The last of these is its input.
    assert second.work.num_computed_tokens.tolist() == [3 + 1 + 3]
    third = driver.plan()
    assert third is not None
    assert third.work.num_computed_tokens.tolist() == [3 + 1 + 3 + 8]
    driver.answer(runs=[[4]])
    driver.answer(runs=[[5, 6]])
    rows = driver.core.placement.rows
    assert rows.known_tokens(request.sequence.row_id)[-6:].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows.num_unsure[request.sequence.row_id] == 0
    assert rows.num_computed[request.sequence.row_id] == 3 + 2 + 6 - 1


def test_sequence_ends_in_the_middle_of_what_it_might_have_got() -> None:
    driver, (request,) = running_driver(3)
    driver.plan()
    driver.plan()
    driver.answer(runs=[[1, STOP]])
    assert (request.finish_reason, request.sequence.stop_token_id) == (FinishReason.STOP, STOP)
    assert request.sequence.token_ids[-2:].tolist() == [1, STOP]
    # The step behind had no input for it.
    events = driver.answer(row_statuses=[RowStatus.INPUT_UNAVAILABLE], runs=[[]])
    assert not events.any_ended
    assert driver.core.num_free_blocks == driver.config.num_device_blocks


def test_tokens_are_kept_when_a_row_yields_before_they_come() -> None:
    driver, (request, _) = running_driver(3, 4)
    driver.plan()
    driver.preempt(request)
    driver.answer(runs=[[1, 2, 3], [4] * 8])
    assert request.sequence.token_ids[-3:].tolist() == [1, 2, 3]
    assert request.sequence.num_promised == 0


@pytest.mark.parametrize("run", [[], [1] * 9, [1, 100], [1, -1], [1, STOP, 2]])
def test_row_fails_alone_when_its_tokens_cannot_be(run: list[int]) -> None:
    driver, (request, other) = running_driver(3, 4)
    driver.plan()
    events = driver.answer(runs=[run, [5, 6]])
    assert request.error is not None
    assert request.error[0] == "ROW_FAILED"
    assert events.client_keys.tolist() == [other.client_key] * 2


def test_blocks_are_found_when_all_their_tokens_were_taken() -> None:
    driver, (request,) = running_driver(3)
    before = driver.core.num_cached_blocks
    driver.plan()
    # 3 of the prompt and 2; the 8 that come now fill blocks of 4, but for the last token.
    driver.answer(runs=[list(range(1, 9))])
    assert driver.core.num_cached_blocks - before == (3 + 2 + 8 - 1) // 4 - (3 + 1) // 4
    driver.plan()
    driver.answer(runs=[[1]])
    assert driver.core.num_cached_blocks - before == (3 + 2 + 9 - 1) // 4 - (3 + 1) // 4
    known = driver.core.placement.known_tokens(request.sequence).tolist()
    again = driver.make_request(known, "again")
    prefixes = driver.core.placement.blocks.prefixes
    prefixes.adopt(again.sequence)
    assert prefixes.find(again.sequence).num_tokens == (len(known) - 1) // 4 * 4
