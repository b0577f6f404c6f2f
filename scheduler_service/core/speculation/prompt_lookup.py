"""Prompt lookup: what followed the last tokens of a row earlier in the same row follows again.

An index has, by a hash of three tokens, the position after their latest occurrence. It is a table
of a fixed size for each row: what is overwritten is forgotten, and what is found is compared with
the tokens themselves. A row whose guess was right goes on where it was, without looking anything
up, so it follows a long copy even where three tokens alone are ambiguous.

All of it follows from the tokens of a row, in the order in which they came. Tables are not part of
a dumped core, but made again.

Shape letters: N rows, S places of a table, R rows that are asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler_service.core.request import BoolArray, Int32Array, Int64Array
from scheduler_service.core.row_columns import NO_STAY, RowColumns
from scheduler_service.core.speculation.proposer import Float64Array

# Tokens that must be the same before a guess is made.
NUM_MATCHED = 3
# What is assumed of a row of which nothing is known, and how fast it is corrected.
FIRST_ACCEPTANCE = 0.5
_NEWEST_WEIGHT = 0.2
# 128 KiB a row.
_MOST_PLACES = 2**15
_NO_GUESS = -1
# Odd numbers; what they are matters little.
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)
_UNSEEN = 0


class PromptLookup:
    """See the top of this file; `acceptance` as `Proposer` says."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        max_num_rows, max_len = rows.token_ids.shape
        num_places = 2 ** min((2 * max_len - 1).bit_length(), _MOST_PLACES.bit_length() - 1)
        # Of the 32 bits of a hash, those beyond the places.
        self._shift = 33 - num_places.bit_length()
        # [N, S]: the position after three tokens of this hash, which is never 0.
        self._tables = np.zeros((max_num_rows, num_places), np.int32)
        self._stay_ids = np.full(max_num_rows, NO_STAY, np.int64)
        self._num_seen = np.zeros(max_num_rows, np.int32)
        # Where the token is that is guessed to be the next; all before it is seen.
        self._guesses = np.full(max_num_rows, _NO_GUESS, np.int32)
        self.acceptance: Float64Array = np.full(max_num_rows, FIRST_ACCEPTANCE)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tables"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        num_places = 2 ** (32 - self._shift)
        self._tables = np.zeros((len(self._stay_ids), num_places), np.int32)
        is_there = (self._stay_ids != NO_STAY) & (self._stay_ids == self._rows.stay_ids)
        for row_id in np.flatnonzero(is_there).tolist():
            self._index(row_id, 0, int(self._num_seen[row_id]))

    def look(self, row_ids: Int64Array) -> BoolArray:
        """See Proposer. Costs as much as there is new."""
        rows = self._rows
        is_new = self._stay_ids[row_ids] != rows.stay_ids[row_ids]
        if np.count_nonzero(is_new):
            self._begin(row_ids[is_new])
        num_more = rows.num_known[row_ids] - self._num_seen[row_ids]
        is_one = (num_more == 1) & (self._num_seen[row_ids] >= NUM_MATCHED)
        if np.count_nonzero(is_one):
            self._take_one(row_ids[is_one])
        for row_id in row_ids[(num_more > 0) & ~is_one].tolist():
            self._take(row_id)
        has_guess: BoolArray = self._guesses[row_ids] != _NO_GUESS
        return has_guess

    def propose(self, row_id: int, most: int) -> Int32Array:
        """See Proposer. Where the guess reaches the end, what is guessed is repeated."""
        known = self._rows.known_tokens(row_id)
        guess = int(self._guesses[row_id])
        assert 0 <= guess < len(known), "a row without a guess"
        return np.resize(known[guess : guess + most], most)

    # -- what is new ---------------------------------------------------------------------------

    def _begin(self, row_ids: Int64Array) -> None:
        """These rows have other sequences than before."""
        self._tables[row_ids] = _UNSEEN
        self._stay_ids[row_ids] = self._rows.stay_ids[row_ids]
        self._num_seen[row_ids] = 0
        self._guesses[row_ids] = _NO_GUESS
        self.acceptance[row_ids] = FIRST_ACCEPTANCE

    def _take_one(self, row_ids: Int64Array) -> None:
        """Each of these rows has one token more."""
        token_ids, last = self._rows.token_ids, self._num_seen[row_ids].astype(np.int64)
        guesses = self._guesses[row_ids]
        has_guess = guesses != _NO_GUESS
        is_right = has_guess & (token_ids[row_ids, guesses] == token_ids[row_ids, last])
        self._learn(row_ids[has_guess], is_right[has_guess])
        # The token before has a successor now.
        self._tables[row_ids, self._places(row_ids, last)] = last
        self._num_seen[row_ids] += 1
        self._guesses[row_ids] = guesses + 1
        self._find(row_ids[~is_right])

    def _take(self, row_id: int) -> None:
        """A row has several tokens more, or its first ones."""
        rows, start = self._rows, int(self._num_seen[row_id])
        known = rows.known_tokens(row_id)
        guess, num_new = int(self._guesses[row_id]), len(known) - start
        num_right = 0
        if guess != _NO_GUESS:
            is_wrong = known[guess : guess + num_new] != known[start:]
            num_right = int(is_wrong.argmax()) if np.count_nonzero(is_wrong) else num_new
            for is_right in [True] * num_right + [False] * (num_right < num_new):
                self._learn(np.array([row_id]), np.array([is_right]))
        self._index(row_id, start, len(known))
        self._num_seen[row_id] = len(known)
        self._guesses[row_id] = guess + num_new
        if guess == _NO_GUESS or num_right < num_new:
            self._find(np.array([row_id]))

    def _learn(self, row_ids: Int64Array, is_right: BoolArray) -> None:
        acceptance = self.acceptance[row_ids]
        self.acceptance[row_ids] = acceptance + _NEWEST_WEIGHT * (is_right - acceptance)

    # -- the index -----------------------------------------------------------------------------

    def _index(self, row_id: int, start: int, end: int) -> None:
        """The tokens from `start` to `end` have become known."""
        start = max(start, NUM_MATCHED)
        if start >= end:
            return
        tokens = self._rows.token_ids[row_id, start - NUM_MATCHED : end - 1].astype(np.uint32)
        parts = (
            factor * tokens[i : len(tokens) - NUM_MATCHED + 1 + i]
            for i, factor in enumerate(_FACTORS)
        )
        hashes = sum(parts, np.zeros(end - start, np.uint32))
        # Of the same place, the last one stays.
        self._tables[row_id, (hashes >> self._shift).astype(np.int64)] = np.arange(start, end)

    def _places(self, row_ids: Int64Array, ends: Int64Array) -> Int64Array:
        """Where the index has what follows the tokens before `ends`."""
        token_ids = self._rows.token_ids
        hashes = np.zeros(len(row_ids), np.uint32)
        for i, factor in enumerate(_FACTORS):
            hashes += factor * token_ids[row_ids, ends - NUM_MATCHED + i].astype(np.uint32)
        places: Int64Array = (hashes >> self._shift).astype(np.int64)
        return places

    def _find(self, row_ids: Int64Array) -> None:
        """Looks for the last tokens of these rows, earlier in them."""
        token_ids, ends = self._rows.token_ids, self._num_seen[row_ids].astype(np.int64)
        found = np.full(len(row_ids), _NO_GUESS, np.int32)
        is_long = ends >= NUM_MATCHED
        long_ids, ends = row_ids[is_long], ends[is_long]
        positions = self._tables[long_ids, self._places(long_ids, ends)].astype(np.int64)
        is_same = positions != _UNSEEN
        for back in range(1, NUM_MATCHED + 1):
            is_same &= token_ids[long_ids, positions - back] == token_ids[long_ids, ends - back]
        found[is_long] = np.where(is_same, positions, _NO_GUESS)
        self._guesses[row_ids] = found
