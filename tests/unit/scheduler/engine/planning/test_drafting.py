"""Rows that repeat themselves get drafts; those that do not are planned as ever."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.config import Feature, Speculation
from scheduler_service.scheduler.values.plan import StepPlan
from scheduler_service.scheduler.values.request import FinishReason, Request
from tests.support.core.driver import CoreDriver, make_config

FEATURES = make_config().features | {Feature.SEVERAL_TOKENS}
# After the first token, 5, come 6 and 7 again.
REPEATED = [3, 4, 5, 6, 7, 8, 9, 3, 4]
NEW = [11, 12, 13, 14]
# A pass takes so long, for one token or for many.
PASS_US = 1000


def driver_of(*prompts: list[int], depth: int = 1, **options: object) -> tuple[CoreDriver, Drafted]:
    values: dict[str, object] = {
        "features": FEATURES,
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
    _, drafted = driver_of(REPEATED)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[7, 8, 9, 3]]
    assert plan.num_tokens == 5


def test_tokens_are_taken_as_far_as_drafts_were_right() -> None:
    driver, drafted = driver_of(REPEATED)
    begin(drafted, {"r1": [5, 6]})
    drafted.plan()
    drafted.answer({"r1": [7, 8, 50]})
    rows, row_id = driver.core.placement.rows, drafted.requests[0].sequence.row_id
    assert rows.known_tokens(row_id).tolist() == [*REPEATED, 5, 6, 7, 8, 50]
    assert (rows.num_unsure[row_id], rows.num_tokens[row_id]) == (0, rows.num_known[row_id])
    assert rows.num_computed[row_id] == rows.num_known[row_id] - 1
    totals = driver.core.draft_totals
    assert (totals.num_steps, totals.num_drafts, totals.num_accepted) == (1, 4, 2)
    # 50 may have been changed in what is 9 there.
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[3, 4, 5, 6]]


def test_row_is_held_back_until_its_tokens_are_known_and_others_go_on() -> None:
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


def test_rows_are_planned_ahead_as_ever_when_nothing_repeats_itself() -> None:
    _, drafted = driver_of([3, 4, 5], NEW, depth=2)
    drafted.plan()
    for number in range(20, 40):
        drafted.answer({"r1": [number], "r2": [number + 20]})
        plans = drafted.plan()
        assert [drafted.names(plan) for plan in plans] == [["r1", "r2"]] * 2
        assert [drafts_of(plan) for plan in plans] == [[[], []]] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"features": make_config().features},
        {"speculation": Speculation.OFF},
        {"max_draft_tokens": 0},
    ],
)
def test_nothing_is_guessed_when_it_is_not_wanted_or_not_possible(
    options: dict[str, object],
) -> None:
    _, drafted = driver_of(REPEATED, depth=1, **options)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[]]


def test_prompts_come_first_and_nobody_is_held_back_for_drafts_beside_them() -> None:
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


def test_sequence_gets_no_more_than_it_may_have() -> None:
    driver, drafted = driver_of()
    request = driver.add(REPEATED, max_tokens=4)
    drafted.requests.append(request)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert drafts_of(plan) == [[7]]
    drafted.answer({"r1": [7, 8]})
    assert request.finish_reason is FinishReason.LENGTH


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


def test_row_that_had_drafts_a_moment_ago_runs_on_less_far() -> None:
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


def test_row_that_may_soon_have_a_guess_waits_for_its_tokens_when_it_is_alone() -> None:
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


def test_row_that_may_soon_have_a_guess_does_not_wait_when_others_go_on() -> None:
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


def test_row_gets_drafts_when_there_is_no_time_to_run_on() -> None:
    _, drafted = driver_of(REPEATED, max_run_ahead=5, max_run_ahead_ms=0)
    begin(drafted, {"r1": [5, 6]})
    (plan,) = drafted.plan()
    assert (drafts_of(plan), plan.work.num_run_on_tokens) == ([[7, 8, 9, 3]], None)
