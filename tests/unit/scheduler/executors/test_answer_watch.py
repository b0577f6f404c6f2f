"""Tests how long steps may take, and which executors are given up for being slow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.executors import (
    BELIEVED_STEPS,
    FACTOR,
    FIRST_LENIENCE,
    GOOD_STEPS,
    MAX_LENIENCE,
    AnswerWatch,
    LivenessVerdict,
    MeasuredStep,
    SignsOfLife,
    StepPatience,
    StepSize,
)
from scheduler_service.scheduler.values import BlockMoves, RowWork, StepPlan, TableWrites

FLOOR_S = 2.0
CEILING_S = 300.0
SIZE = StepSize(1, 10)


class Fleet:
    """Executors that answer in a hundredth of a second; `now_s` is the time."""

    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.pulse = SignsOfLife()
        self.watches = {
            name: AnswerWatch(name, StepPatience(FLOOR_S, CEILING_S), self.pulse) for name in names
        }
        for _ in range(BELIEVED_STEPS):
            self.step(names)

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def send(self, name: str) -> None:
        self.watches[name].sent(SIZE, self.now_ns)

    def step(self, names: Collection[str]) -> None:
        """Those that have nothing to do get a step, and all answer."""
        for name in names:
            if self.watches[name].is_idle:
                self.send(name)
        self.now_s += 0.01
        for name in names:
            self.watches[name].answered(self.now_ns)

    def wait(self, seconds: float, *, answering: Collection[str] = ()) -> dict[str, float]:
        """Lets time pass while some do steps; who was given up, and after how long."""
        given_up: dict[str, float] = {}
        start_s = self.now_s
        while self.now_s < start_s + seconds:
            self.step(answering)
            for name, watch in self.watches.items():
                if name not in given_up and watch.look(self.now_ns) is LivenessVerdict.GIVE_UP:
                    given_up[name] = self.now_s - start_s
        return given_up


def test_executor_is_kept_while_parts_of_its_step_come() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a")
    for _ in range(10):
        assert fleet.wait(0.8 * FLOOR_S, answering=["b"]) == {}
        fleet.watches["a"].progressed(fleet.now_ns)
    assert fleet.wait(2 * FLOOR_S, answering=["b"]).keys() == {"a"}


def test_executor_is_given_up_when_it_hangs_while_others_answer() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.send("a")
    given_up = fleet.wait(10, answering=["b", "c"])
    assert given_up.keys() == {"a"}
    assert given_up["a"] == pytest.approx(FLOOR_S, abs=0.1)


@pytest.mark.parametrize("has_measured", [True, False])
def test_first_step_is_given_up_by_what_was_measured(
    has_measured: bool,
) -> None:
    fleet = Fleet("a", "b")
    measured = MeasuredStep(SIZE, 0.01) if has_measured else None
    patience = StepPatience(FLOOR_S, CEILING_S, measured)
    fleet.watches["fresh"] = AnswerWatch("fresh", patience, fleet.pulse)
    fleet.send("fresh")
    given_up = fleet.wait(2 * CEILING_S, answering=["a", "b"])
    assert given_up.keys() == {"fresh"}
    after_s = FIRST_LENIENCE * FLOOR_S if has_measured else CEILING_S
    assert given_up["fresh"] == pytest.approx(after_s, abs=0.1)


def test_executor_is_not_given_up_when_it_answers_in_time() -> None:
    fleet = Fleet("a", "b")
    for _ in range(20):
        fleet.send("a")
        assert fleet.wait(FLOOR_S * 0.9, answering=["b"]) == {}
        fleet.step(["a"])


def test_last_executor_is_not_given_up_before_the_ceiling() -> None:
    fleet = Fleet("a")
    fleet.send("a")
    assert fleet.wait(CEILING_S - 1) == {}
    assert fleet.watches["a"].is_doubtful
    assert fleet.wait(2).keys() == {"a"}


def test_nobody_is_given_up_when_all_stand_still_and_go_on() -> None:
    fleet = Fleet("a", "b", "c")
    for name in fleet.watches:
        fleet.send(name)
    assert fleet.wait(100) == {}
    for name in ["b", "c", "a"]:  # a second apart, so the last of them goes on after the others
        fleet.watches[name].answered(fleet.now_ns)
        assert fleet.wait(FLOOR_S / 4) == {}
    assert not any(watch.is_doubtful for watch in fleet.watches.values())


def test_executor_is_given_up_when_only_others_go_on() -> None:
    fleet = Fleet("a", "b")
    for name in fleet.watches:
        fleet.send(name)
    fleet.wait(100)
    fleet.watches["b"].answered(fleet.now_ns)
    given_up = fleet.wait(10, answering=["b"])
    assert given_up.keys() == {"a"}
    assert given_up["a"] >= FLOOR_S / 2


def test_nobody_is_given_up_when_this_process_stood_still() -> None:
    fleet = Fleet("a", "b")
    for name in fleet.watches:
        fleet.send(name)
    fleet.now_s += 100
    assert [watch.look(fleet.now_ns) for watch in fleet.watches.values()] == [
        LivenessVerdict.ASK
    ] * 2
    fleet.watches["b"].answered(fleet.now_ns)
    assert fleet.watches["a"].look(fleet.now_ns) is LivenessVerdict.WAIT


def test_executor_is_given_up_when_an_idle_one_answers() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a")
    fleet.now_s += FLOOR_S / 2
    assert fleet.watches["a"].look(fleet.now_ns) is LivenessVerdict.ASK
    fleet.now_s += 0.01
    fleet.pulse.show("b", fleet.now_ns)
    fleet.now_s += FLOOR_S / 2
    assert fleet.watches["a"].look(fleet.now_ns) is LivenessVerdict.GIVE_UP


def test_executor_is_doubtful_while_it_is_late() -> None:
    fleet = Fleet("a")
    fleet.send("a")
    fleet.wait(FLOOR_S * 0.9)
    assert not fleet.watches["a"].is_doubtful
    fleet.wait(FLOOR_S * 0.2)
    assert fleet.watches["a"].is_doubtful
    fleet.step(["a"])
    assert not fleet.watches["a"].is_doubtful


def test_executor_has_more_time_when_it_was_given_up_before() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a")
    fleet.wait(10, answering=["b"])
    patience = fleet.watches["a"].patience
    fleet.watches["a"] = AnswerWatch("a", patience, fleet.pulse)  # the same life again
    fleet.send("a")
    given_up = fleet.wait(20, answering=["b"])
    assert given_up["a"] == pytest.approx(2 * FLOOR_S, abs=0.1)


def test_broken_connection_is_not_about_steps() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a")
    fleet.watches["a"].cut()
    assert fleet.watches["a"].is_doubtful
    assert fleet.wait(CEILING_S * 2, answering=["b"]) == {}
    fleet.watches["a"].mended(fleet.now_ns)
    assert not fleet.watches["a"].is_doubtful
    assert fleet.wait(FLOOR_S * 0.9, answering=["b"]) == {}
    assert fleet.wait(FLOOR_S * 0.2, answering=["b"]).keys() == {"a"}


def test_executor_that_has_nothing_to_do_is_never_given_up() -> None:
    assert Fleet("a", "b").wait(2 * CEILING_S, answering=["b"]) == {}


MOST_S = 500.0
DECODE = StepSize(num_tokens=8, num_attended=800)
PROMPT = StepSize(num_tokens=80, num_attended=8000)


def patience_after(took_s: float, size: StepSize = DECODE) -> StepPatience:
    patience = StepPatience(FLOOR_S, MOST_S)
    for _ in range(BELIEVED_STEPS):
        patience.observe(size, took_s)
    return patience


def test_first_steps_have_the_most_time_there_is() -> None:
    patience = StepPatience(FLOOR_S, MOST_S)
    for _ in range(BELIEVED_STEPS - 1):
        patience.observe(DECODE, 0.001)
        assert patience.allowed_s(DECODE) == MOST_S
    patience.observe(DECODE, 0.001)
    assert patience.allowed_s(DECODE) == FLOOR_S


def test_first_steps_go_by_the_one_that_the_executor_has_measured() -> None:
    patience = StepPatience(FLOOR_S, MOST_S, MeasuredStep(DECODE, 1.0))
    assert patience.allowed_s(DECODE) == FIRST_LENIENCE * FACTOR * 1.0
    assert patience.allowed_s(PROMPT) == FIRST_LENIENCE * FACTOR * 10.0
    for _ in range(BELIEVED_STEPS - 1):
        patience.observe(DECODE, 0.001)
        assert patience.allowed_s(DECODE) == FIRST_LENIENCE * FACTOR * 1.0
    patience.observe(DECODE, 0.001)
    assert patience.allowed_s(DECODE) == FLOOR_S


def test_first_steps_have_more_than_the_floor() -> None:
    patience = StepPatience(FLOOR_S, MOST_S, MeasuredStep(DECODE, 1e-6))
    assert patience.allowed_s(DECODE) == FIRST_LENIENCE * FLOOR_S
    patience.gave_up()
    assert patience.allowed_s(DECODE) == 2 * FIRST_LENIENCE * FLOOR_S


def test_first_steps_have_at_most_all_the_time_there_is() -> None:
    assert StepPatience(1.0, 2.0, MeasuredStep(DECODE, 0.5)).allowed_s(DECODE) == 2.0
    assert StepPatience(1.0, 2.0, MeasuredStep(DECODE, 1e9)).allowed_s(PROMPT) == 2.0


LONG = StepSize(DECODE.num_tokens, 3 * DECODE.num_attended)


@pytest.mark.parametrize(
    ("known", "asked", "factor"),
    [(DECODE, DECODE, 1), (DECODE, PROMPT, 10), (DECODE, LONG, 3), (PROMPT, DECODE, 1)],
    ids=["alike", "more tokens", "more attended", "smaller"],
)
def test_step_may_take_a_multiple_of_what_others_took(
    known: StepSize, asked: StepSize, factor: int
) -> None:
    assert patience_after(5.0, known).allowed_s(asked) == pytest.approx(factor * FACTOR * 5.0)


def test_time_never_exceeds_the_ceiling_nor_falls_below_the_floor() -> None:
    assert patience_after(400.0).allowed_s(DECODE) == MOST_S
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


def test_time_doubles_when_given_up_and_halves_again() -> None:
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
def test_true_time_of_a_step_is_always_allowed(
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


def test_step_of_several_turns_may_take_longer() -> None:
    patience = patience_after(took_s=1.0)
    assert patience.allowed_s(replace(DECODE, num_turns=5)) == 5 * FACTOR


def test_step_of_several_turns_says_nothing_of_one() -> None:
    patience = patience_after(took_s=1.0)
    for _ in range(20):
        patience.observe(replace(DECODE, num_turns=5), 0.1)
    assert patience.allowed_s(DECODE) == FACTOR
