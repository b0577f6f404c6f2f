"""Prompt lookup: what followed the last tokens of a row earlier in the same row follows again.

An index has, by a hash of three tokens, the position after their latest occurrence. It is a table
of a fixed size for each row: what is overwritten is forgotten, and what is found is compared with
the tokens themselves. A row whose guess was right goes on where it was, without looking anything
up, so it follows a long copy even where three tokens alone are ambiguous.

All of it follows from the tokens of a row, in the order in which they came. Tables are not part of
a dumped core, but made again.

Most steps bring a row one token. Plain Python takes a microsecond for that, which operations on
arrays of a few rows do not reach.

Shape letters: N rows, S places of a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler_service.core.request import Int32Array, Int64Array
from scheduler_service.core.row_columns import NO_STAY, RowColumns

# Tokens that must be the same before a guess is made.
NUM_MATCHED = 3
# What is assumed of a row of which nothing is known, and how fast it is corrected.
FIRST_ACCEPTANCE = 0.5
NEWEST_WEIGHT = 0.2
# 128 KiB a row.
_MOST_PLACES = 2**15
_NO_GUESS = -1
_UNSEEN = 0
# Odd numbers; what they are matters little.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_HASH_BITS = 32
_HASH = 2**_HASH_BITS - 1


class PromptLookup:
    """See the top of this file; `acceptance` as `Proposer` says."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        max_num_rows, max_len = rows.token_ids.shape
        num_place_bits = min((2 * max_len - 1).bit_length(), _MOST_PLACES.bit_length() - 1)
        self._shift = _HASH_BITS - num_place_bits
        self._stay_ids = [NO_STAY] * max_num_rows
        self._num_seen = [0] * max_num_rows
        # Where the token is that is guessed to be the next; all before it is seen.
        self._guesses = [_NO_GUESS] * max_num_rows
        self.acceptance = [FIRST_ACCEPTANCE] * max_num_rows
        self._make_tables()

    def _make_tables(self) -> None:
        # [N, S]: the position after three tokens of this hash, which is never 0.
        num_places = 2 ** (_HASH_BITS - self._shift)
        self._tables = np.zeros((len(self._stay_ids), num_places), np.int32)
        # Single elements of these are Python integers, and come four times as fast.
        self._places = self._tables.data
        self._tokens = self._rows.token_ids.data

    def __getstate__(self) -> dict[str, Any]:
        made_again = {"_tables", "_places", "_tokens"}
        return {name: value for name, value in vars(self).items() if name not in made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_tables()
        stays: list[int] = self._rows.stay_ids.tolist()
        for row_id, (stay_id, there) in enumerate(zip(self._stay_ids, stays, strict=True)):
            if stay_id == there != NO_STAY:
                self._index(row_id, 0, self._num_seen[row_id])

    def look(self, row_ids: Int64Array) -> list[int]:
        """See Proposer. Costs as much as there is new."""
        rows, stay_ids, num_seen, guesses = (
            self._rows,
            self._stay_ids,
            self._num_seen,
            self._guesses,
        )
        found = []
        for row_id, stay_id, num_known in zip(
            row_ids.tolist(),
            rows.stay_ids[row_ids].tolist(),
            rows.num_known[row_ids].tolist(),
            strict=True,
        ):
            if stay_ids[row_id] != stay_id:
                self._begin(row_id, stay_id)
            if num_seen[row_id] != num_known:
                self._take(row_id, num_known)
            if guesses[row_id] != _NO_GUESS:
                found.append(row_id)
        return found

    def propose(self, row_id: int, most: int) -> Int32Array:
        """See Proposer. Where the guess reaches the end, what is guessed is repeated."""
        known = self._rows.known_tokens(row_id)
        guess = self._guesses[row_id]
        assert 0 <= guess < len(known), "a row without a guess"
        return np.resize(known[guess : guess + most], most)

    # -- what is new ---------------------------------------------------------------------------

    def _begin(self, row_id: int, stay_id: int) -> None:
        """The row has another sequence than before."""
        self._tables[row_id] = _UNSEEN
        self._stay_ids[row_id] = stay_id
        self._num_seen[row_id] = 0
        self._guesses[row_id] = _NO_GUESS
        self.acceptance[row_id] = FIRST_ACCEPTANCE

    def _take(self, row_id: int, num_known: int) -> None:
        """The row has `num_known` tokens by now."""
        start, guess = self._num_seen[row_id], self._guesses[row_id]
        if guess != _NO_GUESS:
            guess = self._compare(row_id, guess, start, num_known)
        self._index(row_id, start, num_known)
        self._num_seen[row_id] = num_known
        self._guesses[row_id] = self._find(row_id, num_known) if guess == _NO_GUESS else guess

    def _compare(self, row_id: int, guess: int, start: int, end: int) -> int:
        """Learns whether the tokens from `start` on were guessed; where that goes on."""
        tokens, acceptance = self._tokens, self.acceptance[row_id]
        for position in range(start, end):
            is_right = tokens[row_id, guess] == tokens[row_id, position]
            acceptance += NEWEST_WEIGHT * (is_right - acceptance)
            if not is_right:
                guess = _NO_GUESS
                break
            guess += 1
        self.acceptance[row_id] = acceptance
        return guess

    # -- the index -----------------------------------------------------------------------------

    def _index(self, row_id: int, start: int, end: int) -> None:
        """The tokens from `start` to `end` have become known."""
        start = max(start, NUM_MATCHED)
        if end - start == 1:
            self._places[row_id, self._place(row_id, start)] = start
        elif start < end:
            tokens = self._rows.token_ids[row_id, start - NUM_MATCHED : end - 1].astype(np.uint32)
            hashes = np.zeros(end - start, np.uint32)
            for index, factor in enumerate(_FACTORS):
                hashes += np.uint32(factor) * tokens[index : index + end - start]
            # Of the same place, the last one stays.
            self._tables[row_id, hashes >> np.uint32(self._shift)] = np.arange(start, end)

    def _place(self, row_id: int, end: int) -> int:
        """Where the index has what follows the tokens before `end`."""
        tokens, (first, second, third) = self._tokens, _FACTORS
        mixed = first * tokens[row_id, end - 3] + second * tokens[row_id, end - 2]
        place: int = (mixed + third * tokens[row_id, end - 1] & _HASH) >> self._shift
        return place

    def _find(self, row_id: int, end: int) -> int:
        """Looks for the tokens before `end`, earlier in the row."""
        if end < NUM_MATCHED:
            return _NO_GUESS
        tokens, found = self._tokens, self._places[row_id, self._place(row_id, end)]
        if found == _UNSEEN:
            return _NO_GUESS
        for back in range(1, NUM_MATCHED + 1):
            if tokens[row_id, found - back] != tokens[row_id, end - back]:
                return _NO_GUESS
        position: int = found
        return position
