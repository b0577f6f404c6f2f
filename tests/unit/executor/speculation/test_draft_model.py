"""What a draft model computes, and how many tokens it is asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.speculation import (
    MAX_GUESSES,
    AcceptanceRate,
    DraftedRow,
    DraftLengths,
    DraftLimits,
    DraftModel,
    PassTimes,
)
from executor_service.steps import RowStatus, StepInput, StepOutput, TokenRuns
from tests.support.steps.step_driver import Row, make_step

TABLE = list(range(10))
GUESSES = [50, 51, 52]
LIMITS = DraftLimits(100, 100, 1000, 64)
FOLLOWING = replace(LIMITS, follows_states=True)


class _Draft:
    """Guesses the same each time. `computed`: position and tokens of each step, and if asked."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, list[int], bool]] = []

    def execute(self, step: StepInput) -> StepOutput:
        is_asked = bool(step.samples[0])
        position = int(step.num_computed_tokens[0])
        self.computed.append((position, step.token_ids.tolist(), is_asked))
        run = GUESSES if is_asked else []
        return StepOutput(
            np.array([RowStatus.OK], np.uint8),
            np.array([run[-1] if run else -1], np.int32),
            runs=TokenRuns.of([run]),
        )


def step_of(tokens: list[int], position: int) -> StepInput:
    return make_step([Row(tokens, position, TABLE, 20)])


def guess(proposer: DraftModel, token: int, position: int) -> list[int]:
    turn, wanted = step_of([token], position), np.array([3], np.int32)
    proposer.prepare(turn, wanted)
    token_ids: list[int] = proposer.propose(turn, wanted).token_ids.tolist()
    return token_ids


def taken(proposer: DraftModel, token: int, position: int, sampled: list[int]) -> None:
    proposer.follow(step_of([token], position), TokenRuns.of([sampled]))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (LIMITS, [(0, [7, 8, 9], True), (5, [52, 60], True)]),
        # Nothing of the first token; and its own guesses once more, with the model's states.
        (FOLLOWING, [(1, [8, 9], True), (3, [50, 51, 52, 60], True)]),
    ],
)
def test_draft_computes_what_it_has_not_computed(
    limits: DraftLimits, expected: list[tuple[int, list[int], bool]]
) -> None:
    draft = _Draft()
    proposer = DraftModel(draft.execute, limits)
    proposer.follow(step_of([7, 8], 0), None)
    assert guess(proposer, 9, 2) == GUESSES
    taken(proposer, 9, 2, [50, 51, 52, 60])
    assert guess(proposer, 60, 6) == GUESSES
    assert draft.computed == expected


def test_nothing_is_guessed_of_the_first_token_when_states_are_read() -> None:
    draft = _Draft()
    proposer = DraftModel(draft.execute, FOLLOWING)
    assert guess(proposer, 7, 0) == []
    taken(proposer, 7, 0, [8])
    assert guess(proposer, 8, 1) == GUESSES
    assert draft.computed == [(1, [8], True)]


def test_draft_computes_a_long_prompt_before_the_next_step() -> None:
    draft = _Draft()
    proposer = DraftModel(draft.execute, FOLLOWING)
    proposer.follow(step_of(list(range(20)), 0), None)
    proposer.catch_up()
    assert draft.computed == [(1, list(range(1, 20)), False)]


def test_draft_begins_where_a_prefix_ends_when_states_are_read() -> None:
    draft = _Draft()
    proposer = DraftModel(draft.execute, FOLLOWING)
    assert guess(proposer, 9, 16) == GUESSES
    assert draft.computed == [(16, [9], True)]


@pytest.mark.parametrize("limits", [LIMITS, FOLLOWING])
def test_nothing_is_computed_where_the_model_has_forgotten_blocks(limits: DraftLimits) -> None:
    draft = _Draft()
    proposer = DraftModel(draft.execute, replace(limits, num_reachable=3))
    for position in range(10, 110):
        taken(proposer, 7, position, [8])
        proposer.catch_up()
    assert guess(proposer, 9, 110) == GUESSES
    proposer.follow(step_of([5] * 20, 111), None)
    proposer.catch_up()
    # Of a prompt that came meanwhile, all; what is written then is the row's.
    assert draft.computed == [(107, [7, 7, 7, 9], True), (111, [5] * 20, False)]


def test_row_forgets_what_it_owes_before_a_position() -> None:
    row = DraftedRow(3, [4, 5, 6])
    row.forget_before(2)
    assert row == DraftedRow(3, [4, 5, 6])
    row.forget_before(5)
    assert row == DraftedRow(5, [6])
    row.forget_before(9)
    assert row == DraftedRow(6)


_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


class _Slots:
    """The draft's keys and values: what was written where. It computes what a row says."""

    def __init__(self) -> None:
        self.row = DraftedRow(0)
        self.written: dict[int, int] = {}

    def compute(self, guessed: list[int]) -> None:
        start = self.row.num_computed
        for index, token in enumerate([*self.row.owed, *guessed]):
            self.written[start + index] = token
        self.row.settle(guessed)

    def assert_computed_is(self, tokens: list[int]) -> None:
        computed = self.row.num_computed
        assert [self.written[i] for i in range(computed)] == tokens[:computed]
        assert self.row.owed == tokens[computed : computed + len(self.row.owed)]


@given(st.lists(st.tuples(_TOKENS, _TOKENS, st.booleans(), st.integers(0, 2))))
def test_row_is_computed_as_far_as_its_tokens(
    moves: list[tuple[list[int], list[int], bool, int]],
) -> None:
    slots, tokens = _Slots(), list[int]()
    for new, guessed, is_asked, num_repeated in moves:
        # Some steps compute tokens again that were computed before.
        position = len(tokens) - min(num_repeated, len(tokens))
        slots.row.go_to(position)
        if is_asked:
            slots.compute(guessed)
        tokens = tokens[:position] + new
        slots.row.follow(position, new)
        slots.assert_computed_is(tokens)
    assert slots.row.num_computed + len(slots.row.owed) == len(tokens)


def test_row_owes_only_what_follows_its_right_guesses() -> None:
    row = DraftedRow(4)
    row.follow(4, [1, 2])
    row.settle([3, 4, 5])
    row.follow(6, [3, 4, 9])
    assert (row.num_computed, row.owed) == (8, [9])


def test_row_begins_where_its_prefix_ends() -> None:
    row = DraftedRow(0)
    row.follow(0, [1, 2])
    row.follow(16, [7])
    assert (row.num_computed, row.owed) == (16, [7])


class _World:
    """Turns of one row: `a` + `b` seconds a token to verify, `c` a guess, right with `p`."""

    def __init__(self, a: float, b: float, c: float, p: float) -> None:
        self._costs = (a, b, c)
        self.p = p
        self._rng = random.Random(0)
        self.lengths = DraftLengths()
        self.luck = AcceptanceRate()
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


def test_guesses_are_many_when_all_are_right() -> None:
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
    lucky, unlucky = AcceptanceRate(40.0, 40.0), AcceptanceRate(0.0, 40.0)
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
