"""Who gets a trace: by what callers say, and never more than an operator allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve_tracing.trace_config import Sampling


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sampling(ratio: float = 0.0, most: float = 5.0, draw: float = 0.5) -> tuple[Sampling, Clock]:
    clock = Clock()
    return Sampling(ratio, most, clock, lambda: draw), clock


def test_nobody_is_traced_who_wants_none() -> None:
    made, _ = sampling(ratio=1.0)

    assert not made.takes(False)


def test_share_of_those_who_say_nothing_is_drawn() -> None:
    assert sampling(ratio=0.51)[0].takes(None)
    assert not sampling(ratio=0.5)[0].takes(None)


def test_callers_who_ask_get_so_many_a_second_and_no_more() -> None:
    made, clock = sampling()

    assert [made.takes(True) for _ in range(7)] == [True] * 5 + [False] * 2
    clock.now_s += 0.2
    assert [made.takes(True) for _ in range(2)] == [True, False]


def test_callers_who_ask_are_drawn_as_others_are_beyond_that() -> None:
    made, _ = sampling(ratio=1.0, most=0.0)

    assert made.takes(True)


def test_nobody_is_traced_for_asking_when_that_is_not_allowed() -> None:
    assert not sampling(most=0.0)[0].takes(True)


def test_what_is_decided_already_is_gone_by_and_leaves_others_their_number() -> None:
    made, _ = sampling(most=2.0)

    assert all(made.takes(True, is_decided=True) for _ in range(100))
    assert [made.takes(True) for _ in range(3)] == [True, True, False]
    assert not made.takes(False, is_decided=True)
    assert not made.takes(None, is_decided=True)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40)), max_size=30))
def test_bound_holds_whatever_callers_do(bursts: list[tuple[float, int]]) -> None:
    made, clock = sampling(most=10.0)
    taken = 0
    for pause_s, number in bursts:
        clock.now_s += pause_s
        taken += sum(made.takes(True) for _ in range(number))

    assert taken <= 10 + 10 * clock.now_s
