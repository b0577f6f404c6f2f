"""Several tokens a row: rows that run ahead, and rows with drafts."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values import (
    Feature,
    FinishReason,
    Request,
    RowStatus,
    Speculation,
    StepPlan,
)
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


def test_rows_get_one_token_until_a_turn_was_measured() -> None:
    driver = CoreDriver(features=FEATURES, max_run_ahead=8)
    driver.add(3, max_tokens=30)
    for _ in range(3):
        assert num_run_on(driver.plan()) == [0]
        driver.answer()


def test_rows_get_half_of_the_time_behind_another_step() -> None:
    driver, _ = running_driver(3, max_run_ahead_ms=6)
    assert num_run_on(driver.plan()) == [5]
    assert num_run_on(driver.plan()) == [2]


def test_turn_time_is_that_of_the_clock_without_timings() -> None:
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
        # Somebody waits, and a prompt is computed in the same step.
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
    ],
)
def test_rows_get_one_token_when_they_may_have_no_more(options: dict[str, object]) -> None:
    driver, _ = running_driver(3, **options)
    if "max_num_seqs" in options:
        driver.add(20)
    assert set(num_run_on(driver.plan())) == {0}


def test_rows_that_run_ahead_leave_an_eighth_of_the_blocks() -> None:
    driver, _ = running_driver(3, 3, num_device_blocks=16, max_run_ahead=60)
    # Both together want 18 blocks to the end; the less urgent one gets what is left.
    assert num_run_on(driver.plan()) == [27, (16 - 2 - 9) * 4 - 4 - 1]
    assert driver.core.num_free_blocks == 16 // 8


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


def test_sequence_ends_at_a_stop_token_within_a_run() -> None:
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


DRAFT_FEATURES = make_config().features | {Feature.SEVERAL_TOKENS}
# After the first token, 5, come 6 and 7 again.
REPEATED = [3, 4, 5, 6, 7, 8, 9, 3, 4]
NEW = [11, 12, 13, 14]
# A pass takes so long, for one token or for many.
PASS_US = 1000


def driver_of(*prompts: list[int], depth: int = 1, **options: object) -> tuple[CoreDriver, Drafted]:
    values: dict[str, object] = {
        "features": DRAFT_FEATURES,
        "speculation": Speculation.PROMPT_LOOKUP,
        "max_draft_tokens": 4,
    }
    driver = CoreDriver(**(values | options))  # type: ignore[arg-type]
    return driver, Drafted(driver, depth, [driver.add(prompt, max_tokens=60) for prompt in prompts])


class Drafted:
    """Answers steps of requests, each of which goes on with tokens that the test gives."""

    def __init__(self, driver: CoreDriver, depth: int, requests: list[Request]) -> None:
        self.driver = driver
        self.depth = depth
        self.requests = requests

    def plan(self) -> list[StepPlan]:
        """All that can be in flight."""
        while len(self.driver.in_flight) < self.depth and self.driver.plan():
            pass
        return self.driver.in_flight

    def names(self, plan: StepPlan) -> list[str]:
        return [name for name, _, _ in self.driver.rows_of(plan)]

    def answer(self, runs: dict[str, list[int]]) -> None:
        """The oldest step in flight brings these, by request."""
        plan = self.driver.in_flight[0]
        self.driver.answer(runs=[runs[name] for name in self.names(plan)], compute_us=PASS_US)


def drafts_of(plan: StepPlan) -> list[list[int]]:
    drafts = plan.work.drafts
    if drafts is None:
        return [[] for _ in plan.work.row_ids]
    tokens, parts = drafts.token_ids.tolist(), []
    for count in drafts.counts.tolist():
        parts.append(tokens[:count])
        del tokens[:count]
    return parts


def begin(drafted: Drafted, tokens: dict[str, list[int]]) -> None:
    """Prompts are computed, and what a pass takes is known; these are the first tokens."""
    drafted.plan()
    drafted.answer({name: run[:1] for name, run in tokens.items()})
    drafted.plan()
    drafted.answer({name: run[1:2] for name, run in tokens.items()})


def test_row_that_repeats_itself_gets_what_came_then_as_drafts() -> None:
    driver, drafted = driver_of(REPEATED)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[7, 8, 9, 3]]
    assert plan.num_tokens == 5
    drafted.answer({"r1": [7, 8, 50]})
    totals = driver.core.draft_totals
    assert (totals.num_steps, totals.num_drafts, totals.num_accepted) == (1, 4, 2)


def test_row_with_drafts_waits_for_its_tokens_beside_others() -> None:
    _, drafted = driver_of(REPEATED, NEW, depth=2)
    drafted.plan()
    drafted.answer({"r1": [5], "r2": [15]})
    drafted.plan()
    drafted.answer({"r1": [6], "r2": [16]})
    # One with both was in flight when it was seen that r1 repeats itself.
    first, second = drafted.plan()
    assert (drafted.names(first), drafted.names(second)) == (["r1", "r2"], ["r2"])
    drafted.answer({"r1": [7], "r2": [17]})
    _, third = drafted.plan()
    assert drafted.names(third) == ["r1", "r2"]
    assert drafts_of(third) == [[8, 9, 3, 4], []]


@pytest.mark.parametrize(
    "options",
    [
        {"features": make_config().features},
        {"speculation": Speculation.OFF},
        {"max_draft_tokens": 0},
    ],
)
def test_nothing_is_drafted_when_it_is_off_or_unsupported(
    options: dict[str, object],
) -> None:
    _, drafted = driver_of(REPEATED, depth=1, **options)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[]]


def test_rows_beside_prompts_get_no_drafts() -> None:
    driver, drafted = driver_of(REPEATED, depth=2)
    begin(drafted, {"r1": [5, 6]})
    drafted.plan()
    driver.add([20 + token % 60 for token in range(100)], "long")
    drafted.answer({"r1": [7]})
    for plan in drafted.plan():
        assert drafted.names(plan) == ["r1", "long"]
        assert drafts_of(plan) == [[], []]


def test_drafts_are_no_more_than_a_step_may_have_tokens() -> None:
    _, drafted = driver_of(REPEATED, REPEATED, max_num_batched_tokens=18, max_draft_tokens=30)
    begin(drafted, {"r1": [5, 6], "r2": [5, 6]})
    (plan,) = drafted.plan()
    assert plan.num_tokens <= 18
    assert len(drafts_of(plan)[0]) > 1


def test_drafts_are_no_more_than_there_is_room_for() -> None:
    driver, drafted = driver_of(REPEATED, num_device_blocks=40)
    driver.core.pools[0].allocate(40 - 3)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    # Of 12 slots, 10 have something, and the input needs one.
    assert drafts_of(plan) == [[7]]
    assert driver.core.num_preemptions == 0


def test_row_whose_guesses_were_wrong_gets_none() -> None:
    _, drafted = driver_of(REPEATED)
    begin(drafted, {"r1": [5, 6]})
    num_drafted = 0
    for _ in range(30):
        # Again and again the same three tokens, and something else behind them.
        for token in (3, 4, 5, 60 + num_drafted % 7):
            (plan,) = drafted.plan()
            num_drafted = max(num_drafted, len(drafts_of(plan)[0]))
            drafted.answer({"r1": [token]})
            if not drafted.driver.core.num_running:
                assert drafts_of(plan) == [[]]
                return
    raise AssertionError("it did not end")


def test_row_runs_on_as_ever_when_it_has_no_drafts() -> None:
    _, drafted = driver_of(NEW, max_run_ahead=5)
    begin(drafted, {"r1": [15, 16]})
    (plan,) = drafted.plan()
    assert plan.work.num_run_on_tokens is not None
    assert plan.work.num_run_on_tokens.tolist() == [4]


def test_row_that_had_drafts_runs_less_far_ahead() -> None:
    _, drafted = driver_of(REPEATED, max_run_ahead=8)
    begin(drafted, {"r1": [5, 6]})
    drafted.plan()
    drafted.answer({"r1": [7, 50]})
    drafted.plan()
    drafted.answer({"r1": [51]})
    lengths = []
    for token in range(52, 92):
        (plan,) = drafted.plan()
        assert drafts_of(plan) == [[]]
        assert plan.work.num_run_on_tokens is not None
        lengths.append(1 + int(plan.work.num_run_on_tokens[0]))
        drafted.answer({"r1": [token]})
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (4, 8)


def test_row_about_to_repeat_waits_for_its_tokens_when_alone() -> None:
    _, drafted = driver_of(REPEATED, depth=2, max_run_ahead=8)
    drafted.plan()
    drafted.answer({"r1": [5]})
    drafted.plan()
    for run in ([6], [7], [8, 50], [51]):
        drafted.answer({"r1": run})
        drafted.plan()
    # What it has now is new, and yet nothing is planned behind that.
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[]]
    drafted.answer({"r1": [52]})
    for token in range(53, 99):
        if len(drafted.plan()) == 2:
            assert token > 70
            return
        drafted.answer({"r1": [token]})
    raise AssertionError("it waits for ever")


def test_row_about_to_repeat_does_not_wait_beside_others() -> None:
    _, drafted = driver_of(REPEATED, NEW, depth=2, max_run_ahead=8)
    drafted.plan()
    drafted.answer({"r1": [5], "r2": [15]})
    drafted.plan()
    drafted.answer({"r1": [6], "r2": [16]})
    drafted.plan()
    tokens = iter(range(17, 99))
    has_drafted = False
    for _ in range(8):
        plans = drafted.plan()
        has_drafted |= any(map(any, map(drafts_of, plans)))
        names = drafted.names(plans[0])
        drafted.answer({name: [7 if name == "r1" else next(tokens)] for name in names})
    assert has_drafted
    for token in range(60, 70):
        plans = drafted.plan()
        drafted.answer({name: [token + 20 * (name == "r2")] for name in drafted.names(plans[0])})
    assert [drafted.names(plan) for plan in drafted.plan()] == [["r1", "r2"]] * 2


def test_row_gets_drafts_when_it_cannot_run_ahead() -> None:
    _, drafted = driver_of(REPEATED, max_run_ahead=5, max_run_ahead_ms=0)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert (drafts_of(plan), plan.work.num_run_on_tokens) == ([[7, 8, 9, 3]], None)
