"""Prompt lookup: guesses are what came after the last tokens before, and how good they are."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.request import Request, Sequence
from scheduler_service.core.row_columns import RowColumns
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.speculation.prompt_lookup import (
    FIRST_ACCEPTANCE,
    NEWEST_WEIGHT,
    NUM_MATCHED,
    PromptLookup,
)

MAX_LEN = 300


class Texts:
    """Rows whose tokens a test writes."""

    def __init__(self, *prompts: list[int]) -> None:
        self.rows = RowColumns(max_num_rows=4, max_len=MAX_LEN, block_size=4, max_blocks=80)
        self.lookup = PromptLookup(self.rows)
        self.sequences = [self.start(prompt, number) for number, prompt in enumerate(prompts)]

    def start(self, prompt: list[int], number: int) -> Sequence:
        request = Request.create(f"r{number}", prompt, SamplingParams(), arrival=number, seed=0)
        request.stop_len = MAX_LEN
        self.rows.add(request.sequence, (number,), num_computed=0)
        return request.sequence

    def write(self, tokens: list[int], index: int = 0) -> None:
        row_ids = np.array([self.sequences[index].row_id])
        counts = np.array([len(tokens)], np.int32)
        self.rows.append_tokens(row_ids, counts, np.array(tokens, np.int32))

    def look(self) -> list[bool]:
        row_ids = np.array([sequence.row_id for sequence in self.sequences])
        found = self.lookup.look(row_ids)
        return [row_id in found for row_id in row_ids.tolist()]

    def guess(self, most: int, index: int = 0) -> list[int]:
        tokens: list[int] = self.lookup.propose(self.sequences[index].row_id, most).tolist()
        return tokens


def test_guess_is_what_came_after_the_last_tokens_before() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert texts.look() == [True]
    assert texts.guess(3) == [5, 6, 9]


def test_guess_is_what_came_latest_when_it_came_several_times() -> None:
    texts = Texts([2, 3, 4, 5, 2, 3, 4, 6, 2, 3, 4])
    texts.look()
    assert texts.guess(1) == [6]


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 1, 2], [1], [1, 2, 3], [1, 2, 3, 1, 2, 4]])
def test_there_is_no_guess_when_the_last_tokens_are_new(prompt: list[int]) -> None:
    assert Texts(prompt).look() == [False]


def test_guess_goes_round_when_it_reaches_the_end() -> None:
    texts = Texts([1, 2, 3, 1, 2, 3])
    texts.look()
    assert texts.guess(7) == [1, 2, 3, 1, 2, 3, 1]


def test_copy_is_followed_when_its_last_tokens_came_elsewhere_since() -> None:
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [30, 4, 5, 6, 40]
    texts = Texts([*first, *second, 1, 2, 3])
    texts.look()
    for token in (4, 5, 6):
        texts.write([token])
        texts.look()
    assert texts.guess(2) == [7, 8]


def test_acceptance_falls_with_wrong_guesses_and_rises_with_right_ones() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 1, 2, 3])
    texts.look()
    (row_id,) = (sequence.row_id for sequence in texts.sequences)
    assert texts.lookup.acceptance[row_id] == FIRST_ACCEPTANCE
    texts.write([4])
    texts.look()
    right = texts.lookup.acceptance[row_id]
    assert right > FIRST_ACCEPTANCE
    texts.write([50])
    texts.look()
    assert texts.lookup.acceptance[row_id] < right


def test_acceptance_is_unchanged_when_nothing_was_guessed() -> None:
    texts = Texts([1, 2, 3])
    texts.look()
    for token in range(10, 30):
        texts.write([token])
        assert texts.look() == [False]
    assert texts.lookup.acceptance[texts.sequences[0].row_id] == FIRST_ACCEPTANCE


def test_nothing_is_left_of_a_sequence_when_another_has_its_row() -> None:
    texts = Texts([1, 2, 3, 4, 5, 1, 2, 3])
    texts.look()
    texts.write([50])
    texts.look()
    row_id = texts.sequences[0].row_id
    texts.rows.remove(texts.sequences[0])
    texts.sequences[0] = texts.start([9, 9, 1, 2, 3], 7)
    assert texts.sequences[0].row_id == row_id
    assert texts.look() == [False]
    assert texts.lookup.acceptance[row_id] == FIRST_ACCEPTANCE


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3),
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        max_size=25,
    ),
    restored_at=st.integers(0, 25),
)
def test_guesses_are_those_of_a_plain_search(
    prompts: list[list[int]], turns: list[tuple[int, list[int]]], restored_at: int
) -> None:
    texts = Texts(*prompts)
    plain = [PlainSearch(prompt) for prompt in prompts]
    assert texts.look() == [search.guess is not None for search in plain]
    for turn, (number, tokens) in enumerate(turns):
        if turn == restored_at:
            texts.rows, texts.lookup = pickle.loads(pickle.dumps((texts.rows, texts.lookup)))
        index = number % len(prompts)
        texts.write(tokens, index)
        plain[index].write(tokens)
        assert texts.look() == [search.guess is not None for search in plain]
        for row, search in enumerate(plain):
            if search.guess is not None:
                assert texts.guess(1, row) == [search.tokens[search.guess]]
            row_id = texts.sequences[row].row_id
            assert texts.lookup.acceptance[row_id] == pytest.approx(search.acceptance)


class PlainSearch:
    """The same, by looking through all tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens = prompt
        self.acceptance = FIRST_ACCEPTANCE
        self.guess = self._find()

    def write(self, tokens: list[int]) -> None:
        guess, start = self.guess, len(self.tokens)
        self.tokens = [*self.tokens, *tokens]
        while guess is not None and start < len(self.tokens):
            is_right = self.tokens[guess] == self.tokens[start]
            self.acceptance += NEWEST_WEIGHT * (is_right - self.acceptance)
            guess, start = (guess + 1, start + 1) if is_right else (None, start)
        self.guess = self._find() if guess is None else guess

    def _find(self) -> int | None:
        last = self.tokens[-NUM_MATCHED:]
        for position in reversed(range(NUM_MATCHED, len(self.tokens))):
            if self.tokens[position - NUM_MATCHED : position] == last:
                return position
        return None
