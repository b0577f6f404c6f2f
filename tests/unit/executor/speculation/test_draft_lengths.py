"""Guesses are as many as pay, by times and luck that were measured."""

from __future__ import annotations

import random

import numpy as np
import pytest

from executor_service.speculation.speculating_runner import (
    MAX_GUESSES,
    DraftLengths,
    Luck,
    PassTimes,
)


class _World:
    """Turns of one row: `a` + `b` seconds a token to verify, `c` a guess, right with `p`."""

    def __init__(self, a: float, b: float, c: float, p: float) -> None:
        self._costs = (a, b, c)
        self.p = p
        self._rng = random.Random(0)
        self.lengths = DraftLengths()
        self.luck = Luck()
        self.seconds = 0.0
        self.num_tokens = 0

    def turn(self, most: int = 8) -> int:
        (a, b, c), lengths = self._costs, self.lengths
        count = int(lengths.choose([self.luck], np.array([most], np.int32))[0])
        num_right = 0
        while num_right < count and self._rng.random() < self.p:
            num_right += 1
        if count:
            lengths.guessing.add(count, c * count)
            lengths.verifying.add(1 + count, a + b * (1 + count))
            for luck in (self.luck, lengths.all_rows):
                luck.add(count, num_right)
        else:
            lengths.plain.add(1, a + b)
            self.luck.fade()
            lengths.fade()
        self.seconds += c * count + a + b * (1 + count)
        self.num_tokens += 1 + num_right
        return count


def test_no_guess_is_made_when_computing_binds() -> None:
    world = _World(a=0.0, b=1.0, c=0.01, p=0.9)
    for _ in range(2000):
        world.turn()
    assert world.seconds < 1.03 * world.num_tokens


def test_wrong_guesses_cost_little() -> None:
    world = _World(a=1.0, b=0.01, c=0.05, p=0.0)
    for _ in range(2000):
        world.turn()
    alone_s = world.num_tokens * 1.01
    assert world.seconds < 1.03 * alone_s


@pytest.mark.parametrize(("p", "gain"), [(0.5, 1.5), (0.8, 2.2), (1.0, 5.0)])
def test_tokens_come_faster_the_more_guesses_are_right(p: float, gain: float) -> None:
    world = _World(a=1.0, b=0.01, c=0.05, p=p)
    for _ in range(500):
        world.turn()
    assert world.num_tokens * 1.01 / world.seconds > gain


def test_guesses_are_many_when_all_are_right_and_never_more_than_may_be() -> None:
    world = _World(a=1.0, b=0.01, c=0.05, p=1.0)
    counts = [world.turn(most=40) for _ in range(100)]
    assert max(counts) == MAX_GUESSES
    assert max(world.turn(most=3) for _ in range(10)) == 3


def test_guesses_come_back_when_a_row_becomes_easy() -> None:
    world = _World(a=1.0, b=0.01, c=0.05, p=0.0)
    for _ in range(300):
        world.turn()
    world.p = 1.0
    assert sum(world.turn() for _ in range(1500)) > 1500


def test_a_lucky_row_gets_guesses_beside_an_unlucky_one() -> None:
    lengths = DraftLengths()
    lengths.plain.add(2, 1.02)
    lengths.verifying.add(6, 1.06)
    lengths.guessing.add(4, 0.2)
    lucky, unlucky = Luck(40.0, 40.0), Luck(0.0, 40.0)
    chosen = lengths.choose([lucky, unlucky], np.array([8, 8], np.int32))
    assert chosen[0] >= 4
    assert chosen[1] <= 1


def test_pass_times_are_a_line_when_sizes_differ() -> None:
    times = PassTimes()
    for size in (1, 4, 8, 2, 16):
        times.add(size, 3.0 + 0.5 * size)
    assert times.of(32) == pytest.approx(19.0, rel=0.05)


def test_pass_times_forget() -> None:
    times = PassTimes()
    for seconds in (9.0, 1.0):
        for size in range(1, 100):
            times.add(size, seconds)
    assert times.of(10) == pytest.approx(1.0, rel=0.1)
