"""What a draft is told to compute, if it reads states of the model beside tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor_service.speculation.draft_model import DraftedRow, DraftLimits, DraftModel
from executor_service.steps.step import RowStatus, StepInput, StepOutput
from executor_service.steps.token_runs import TokenRuns
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
def test_draft_computes_what_it_has_not_or_not_with_states_of_the_model(
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


def test_draft_computes_a_long_prompt_before_the_next_step_when_states_are_read() -> None:
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
