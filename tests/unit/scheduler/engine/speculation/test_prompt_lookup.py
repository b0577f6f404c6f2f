"""Prompt lookup: guesses are what came after the last tokens before, and how good they are."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.engine import RowColumns
from scheduler_service.scheduler.engine.speculation import AcceptanceRates, PromptLookup
from scheduler_service.scheduler.values import Request, SamplingParams, Sequence

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

    def chances(self, most: int, index: int = 0) -> list[float]:
        (chances,) = self.lookup.chances([self.sequences[index].row_id], most).tolist()
        assert isinstance(chances, list)
        return chances


def test_guess_is_what_came_after_the_last_tokens_before() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert texts.look() == [True]
    assert texts.guess(3) == [5, 6, 9]


def test_guess_goes_round_when_it_reaches_the_end() -> None:
    texts = Texts([1, 2, 3, 1, 2, 3])
    texts.look()
    assert texts.guess(7) == [1, 2, 3, 1, 2, 3, 1]


def test_copy_goes_on_behind_a_changed_token() -> None:
    texts = Texts([*range(1, 20), 1, 2, 3])
    texts.look()
    texts.write([4, 5, 50])
    assert texts.look() == [True]
    assert texts.guess(3) == [7, 8, 9]
    texts.write([7])
    texts.look()
    assert texts.guess(2) == [8, 9]


def test_chances_fall_with_wrong_guesses_and_rise_with_right_ones() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 1, 2, 3])
    texts.look()
    fresh = texts.chances(4)
    assert fresh == sorted(fresh, reverse=True)
    assert 0 < fresh[-1] < fresh[0] < 1
    for token in (4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1):
        texts.write([token])
        texts.look()
    right = texts.chances(4)
    assert all(new > old for new, old in zip(right, fresh, strict=True))
    for token in (2, 50, 2, 51, 2, 52, 2):
        texts.write([token])
        texts.look()
    assert texts.chances(1)[0] < fresh[0]


def test_long_copy_is_trusted_further_than_a_fresh_match() -> None:
    fresh = Texts([*range(1, 40), 1, 2, 3])
    fresh.look()
    copied = Texts([*range(1, 40), 1, 2, 3])
    copied.look()
    copied.write(list(range(4, 24)))
    copied.look()
    assert copied.chances(16)[-1] > 2 * fresh.chances(16)[-1]


def test_lookup_forgets_a_sequence_when_its_row_is_reused() -> None:
    texts = Texts([1, 2, 3, 4, 5, 1, 2, 3])
    texts.look()
    texts.write([50])
    texts.look()
    row_id = texts.sequences[0].row_id
    texts.rows.remove(texts.sequences[0])
    texts.sequences[0] = texts.start([9, 1, 2, 9], 7)
    assert texts.sequences[0].row_id == row_id
    assert texts.look() == [True]
    assert texts.guess(1) == [1]
    other = Texts([9, 1, 2, 9])
    other.look()
    assert texts.chances(5) == other.chances(5)


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
                assert texts.chances(20, row) == pytest.approx(search.chances(20))


class PlainSearch:
    """The same, by looking through all tokens, of which each is a search of its own."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens = list(prompt)
        self.luck = AcceptanceRates(1)
        self.is_behind_change = False
        self.guess, self.length = self._longest_match()

    def write(self, tokens: list[int]) -> None:
        for token in tokens:
            guess, length = self.guess, self.length
            self.tokens.append(token)
            if guess is None:
                self.guess, self.length = self._longest_match()
                continue
            is_right = self.tokens[guess] == token
            self.luck.add(0, self._kind(), is_right)
            match, match_length = self._longest_match()
            was_behind_change, self.is_behind_change = self.is_behind_change, False
            if is_right:
                self.guess, self.length = guess + 1, min(length + 1, 16)
                if self.length < match_length:
                    self.guess, self.length = match, match_length
                continue
            self.guess, self.length = match, match_length
            if length >= 4 and not was_behind_change:
                of_match = 0.0 if match is None else self.luck.mean(0, self._kind())
                if self.luck.mean(0, 0) >= of_match:
                    self.guess, self.length, self.is_behind_change = guess + 1, length, True

    def _kind(self) -> int:
        if self.is_behind_change:
            return 0
        return sum(self.length >= least for least in (1, 2, 3, 4, 8, 16))

    def chances(self, most: int) -> list[float]:
        chance, chances = self.luck.mean(0, self._kind()), []
        before = (self.length, self.is_behind_change)
        for _ in range(most):
            chances.append(chance)
            self.length, self.is_behind_change = self.length + 1, False
            chance *= self.luck.mean(0, self._kind())
        self.length, self.is_behind_change = before
        return chances

    def _longest_match(self) -> tuple[int | None, int]:
        for length in (3, 2, 1):
            last = self.tokens[-length:]
            for position in reversed(range(length, len(self.tokens))):
                if self.tokens[position - length : position] == last:
                    return position, length
        return None, 0
