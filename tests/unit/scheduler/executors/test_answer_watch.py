"""Who is given up for being slow, on a clock that stands still unless a test moves it."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from scheduler_service.executors.answer_watch import (
    BELIEVED_STEPS,
    FIRST_LENIENCE,
    AnswerWatch,
    FleetPulse,
    MeasuredStep,
    StepPatience,
    StepSize,
    Verdict,
)

FLOOR_S = 2.0
CEILING_S = 300.0
SIZE = StepSize(1, 10)


class Fleet:
    """Executors that answer in a hundredth of a second; `now_s` is the time."""

    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.pulse = FleetPulse()
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
                if name not in given_up and watch.look(self.now_ns) is Verdict.GIVE_UP:
                    given_up[name] = self.now_s - start_s
        return given_up


def test_executor_is_given_up_when_it_hangs_while_others_answer() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.send("a")
    given_up = fleet.wait(10, answering=["b", "c"])
    assert given_up.keys() == {"a"}
    assert given_up["a"] == pytest.approx(FLOOR_S, abs=0.1)


@pytest.mark.parametrize("has_measured", [True, False])
def test_fresh_executor_is_given_up_for_its_first_step_by_what_it_has_measured(
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


def test_executor_is_given_up_when_it_does_not_go_on_after_all_stood_still() -> None:
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
    assert [watch.look(fleet.now_ns) for watch in fleet.watches.values()] == [Verdict.ASK] * 2
    fleet.watches["b"].answered(fleet.now_ns)
    assert fleet.watches["a"].look(fleet.now_ns) is Verdict.WAIT


def test_executor_is_given_up_when_the_other_has_nothing_to_do_but_says_that_it_is_there() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a")
    fleet.now_s += FLOOR_S / 2
    assert fleet.watches["a"].look(fleet.now_ns) is Verdict.ASK
    fleet.now_s += 0.01
    fleet.pulse.show("b", fleet.now_ns)
    fleet.now_s += FLOOR_S / 2
    assert fleet.watches["a"].look(fleet.now_ns) is Verdict.GIVE_UP


def test_executor_gets_no_new_work_when_it_is_late_until_it_answers() -> None:
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
