"""How long steps may take, by what steps like them took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.executors.answer_watch import (
    BELIEVED_STEPS,
    FACTOR,
    FIRST_LENIENCE,
    GOOD_STEPS,
    MAX_LENIENCE,
    MeasuredStep,
    StepPatience,
    StepSize,
)
from scheduler_service.scheduler.values.plan import BlockMoves, RowWork, StepPlan, TableWrites

FLOOR_S = 2.0
CEILING_S = 500.0
DECODE = StepSize(num_tokens=8, num_attended=800)
PROMPT = StepSize(num_tokens=80, num_attended=8000)


def patience_after(took_s: float, size: StepSize = DECODE) -> StepPatience:
    patience = StepPatience(FLOOR_S, CEILING_S)
    for _ in range(BELIEVED_STEPS):
        patience.observe(size, took_s)
    return patience


def test_first_steps_have_the_most_time_there_is() -> None:
    patience = StepPatience(FLOOR_S, CEILING_S)
    for _ in range(BELIEVED_STEPS - 1):
        patience.observe(DECODE, 0.001)
        assert patience.allowed_s(DECODE) == CEILING_S
    patience.observe(DECODE, 0.001)
    assert patience.allowed_s(DECODE) == FLOOR_S


def test_first_steps_go_by_the_one_that_the_executor_has_measured() -> None:
    patience = StepPatience(FLOOR_S, CEILING_S, MeasuredStep(DECODE, 1.0))
    assert patience.allowed_s(DECODE) == FIRST_LENIENCE * FACTOR * 1.0
    assert patience.allowed_s(PROMPT) == FIRST_LENIENCE * FACTOR * 10.0
    for _ in range(BELIEVED_STEPS - 1):
        patience.observe(DECODE, 0.001)
        assert patience.allowed_s(DECODE) == FIRST_LENIENCE * FACTOR * 1.0
    patience.observe(DECODE, 0.001)
    assert patience.allowed_s(DECODE) == FLOOR_S


def test_first_steps_have_more_than_the_least_though_the_measured_one_took_nothing() -> None:
    patience = StepPatience(FLOOR_S, CEILING_S, MeasuredStep(DECODE, 1e-6))
    assert patience.allowed_s(DECODE) == FIRST_LENIENCE * FLOOR_S
    patience.gave_up()
    assert patience.allowed_s(DECODE) == 2 * FIRST_LENIENCE * FLOOR_S


def test_first_steps_have_at_most_all_the_time_there_is() -> None:
    assert StepPatience(1.0, 2.0, MeasuredStep(DECODE, 0.5)).allowed_s(DECODE) == 2.0
    assert StepPatience(1.0, 2.0, MeasuredStep(DECODE, 1e9)).allowed_s(PROMPT) == 2.0


def test_step_may_take_a_multiple_of_what_others_of_its_size_took() -> None:
    assert patience_after(5.0).allowed_s(DECODE) == pytest.approx(FACTOR * 5.0)


def test_larger_step_may_take_longer_in_proportion_when_only_smaller_ones_are_known() -> None:
    assert patience_after(5.0).allowed_s(PROMPT) == pytest.approx(FACTOR * 50.0)


def test_step_behind_more_tokens_may_take_longer_when_it_attends_to_more() -> None:
    long = StepSize(DECODE.num_tokens, 3 * DECODE.num_attended)
    assert patience_after(5.0).allowed_s(long) == pytest.approx(FACTOR * 15.0)


def test_smaller_step_may_take_as_long_as_larger_ones_took() -> None:
    assert patience_after(5.0, PROMPT).allowed_s(DECODE) == pytest.approx(FACTOR * 5.0)


def test_time_never_exceeds_the_ceiling_nor_falls_below_the_floor() -> None:
    assert patience_after(400.0).allowed_s(DECODE) == CEILING_S
    assert patience_after(0.0).allowed_s(DECODE) == FLOOR_S
    assert StepPatience(10.0, 1.0).allowed_s(DECODE) == 1.0


def test_one_step_of_a_suspended_machine_changes_little() -> None:
    patience = patience_after(0.01)
    patience.observe(DECODE, 400.0)
    assert patience.allowed_s(DECODE) <= FLOOR_S


def test_executor_that_gets_slower_is_followed() -> None:
    patience = patience_after(0.5)
    for _ in range(50):
        patience.observe(DECODE, 20.0)
    assert patience.allowed_s(DECODE) == pytest.approx(FACTOR * 20.0, rel=0.01)


def test_time_doubles_with_each_giving_up_to_a_bound_and_halves_with_good_steps() -> None:
    patience = patience_after(0.01)
    for number in range(1, 5):
        patience.gave_up()
        assert patience.allowed_s(DECODE) == FLOOR_S * 2**number
    for _ in range(10):
        patience.gave_up()
    assert patience.allowed_s(DECODE) == FLOOR_S * MAX_LENIENCE
    for _ in range(GOOD_STEPS):
        patience.observe(DECODE, 0.01)
    assert patience.allowed_s(DECODE) == FLOOR_S * MAX_LENIENCE / 2


def test_slow_steps_do_not_halve_it() -> None:
    patience = patience_after(0.01)
    patience.gave_up()
    for _ in range(2 * GOOD_STEPS):
        patience.observe(DECODE, FLOOR_S * 1.5)
    assert patience.allowed_s(DECODE) >= 2 * FLOOR_S


@given(
    fixed_s=st.floats(0.001, 1.0),
    token_s=st.floats(0.0, 0.01),
    pair_s=st.floats(0.0, 1e-5),
    known=st.lists(
        st.tuples(st.integers(1, 2048), st.integers(1, 10**6)),
        min_size=1,
        max_size=5,
        unique_by=lambda size: size[0].bit_length(),
    ),
    asked=st.tuples(st.integers(1, 2048), st.integers(1, 10**6)),
)
def test_true_time_of_a_step_is_always_allowed_when_it_grows_at_most_in_proportion(
    fixed_s: float,
    token_s: float,
    pair_s: float,
    known: list[tuple[int, int]],
    asked: tuple[int, int],
) -> None:
    def takes_s(size: StepSize) -> float:
        return fixed_s + token_s * size.num_tokens + pair_s * size.num_attended

    patience = StepPatience(0.0, 1e9)
    for sizes in known:
        for _ in range(BELIEVED_STEPS):
            patience.observe(StepSize(*sizes), takes_s(StepSize(*sizes)))
    assert patience.allowed_s(StepSize(*asked)) >= takes_s(StepSize(*asked))


def test_size_counts_tokens_pairs_and_blocks_that_are_moved() -> None:
    work = RowWork(
        row_ids=np.array([0, 1]),
        stay_ids=np.array([1, 2]),
        num_computed_tokens=np.array([0, 2**30], np.int32),
        num_new_tokens=np.array([10, 4], np.int32),
        sampled_steps_back=np.zeros(2, np.int32),
        token_ids=np.zeros(14, np.int32),
        samples=None,
    )
    nothing = np.empty(0, np.int32)
    plan = StepPlan(
        step_id=1,
        base_step_id=None,
        removed_row_ids=(),
        new_rows=(),
        table_writes=TableWrites(nothing, nothing, nothing, nothing),
        moves=BlockMoves(swap_in=[(0, 1), (1, 2)]),
        work=work,
    )
    assert StepSize.of(plan, 16) == StepSize(14 + 2 * 16, 100 + 4 * (2**30 + 4))


def test_step_of_several_turns_may_take_as_long_as_so_many_steps() -> None:
    patience = patience_after(took_s=1.0)
    assert patience.allowed_s(replace(DECODE, num_turns=5)) == 5 * FACTOR


def test_step_of_several_turns_says_nothing_of_one() -> None:
    patience = patience_after(took_s=1.0)
    for _ in range(20):
        patience.observe(replace(DECODE, num_turns=5), 0.1)
    assert patience.allowed_s(DECODE) == FACTOR
