"""Prompt lookup: what followed the last tokens of a row earlier in the same row follows again.

The row is taken to copy itself: from behind the latest occurrence of its last three tokens, failing
that of two, of one. A copy whose guess was right goes on where it was, so a long one is followed
even where three tokens alone are ambiguous; only one that is shorter than that gives way to a
longer match. Where a copy of some length was wrong, one token may have been changed: what comes
behind that one in the copied text is a guess, too, and luck says which of both to take.

Guesses are compared with what comes whether they were used or not, token by token. So all of it
follows from the tokens that a row had when it came here, and those that it got since, however many
came together.

Plain Python takes a few microseconds for a token, which operations on arrays of a few rows do not
reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler_service.core.request import Int32Array, Int64Array
from scheduler_service.core.row_columns import NO_STAY, RowColumns
from scheduler_service.core.speculation.guess_luck import (
    BEHIND_CHANGE,
    KIND_OF_LENGTH,
    LONGEST,
    GuessLuck,
)
from scheduler_service.core.speculation.pass_times import Float64Array
from scheduler_service.core.speculation.token_index import NUM_MATCHED, TokenIndex

_NO_GUESS = -1


class PromptLookup:
    """See the top of this file."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        self._index = TokenIndex(rows)
        self._luck = GuessLuck(rows.max_num_rows)
        self._stay_ids = [NO_STAY] * rows.max_num_rows
        self._num_seen = [0] * rows.max_num_rows
        # Where the token is that is guessed to be the next, as what, and the length of the copy.
        self._guesses = [_NO_GUESS] * rows.max_num_rows
        self._kinds = [BEHIND_CHANGE] * rows.max_num_rows
        self._lengths = [0] * rows.max_num_rows

    def look(self, row_ids: Int64Array) -> list[int]:
        """See Proposer. Costs as much as there is new."""
        rows, stay_ids, num_seen = self._rows, self._stay_ids, self._num_seen
        found = []
        for row_id, stay_id, num_known in zip(
            row_ids.tolist(),
            rows.stay_ids[row_ids].tolist(),
            rows.num_known[row_ids].tolist(),
            strict=True,
        ):
            if stay_ids[row_id] != stay_id:
                self._begin(row_id, stay_id, num_known)
            elif num_seen[row_id] != num_known:
                for position in range(num_seen[row_id], num_known):
                    self._take(row_id, position)
                num_seen[row_id] = num_known
            if self._guesses[row_id] != _NO_GUESS:
                found.append(row_id)
        return found

    def chances(self, row_ids: Sequence[int], most: int) -> Float64Array:
        """See Proposer."""
        kinds = [self._kinds[row_id] for row_id in row_ids]
        lengths = [self._lengths[row_id] for row_id in row_ids]
        return self._luck.chances(row_ids, kinds, lengths, most)

    def propose(self, row_id: int, most: int) -> Int32Array:
        """See Proposer. Where the guess reaches the end, what is guessed is repeated."""
        known = self._rows.known_tokens(row_id)
        guess = self._guesses[row_id]
        assert 0 <= guess < len(known), "a row without a guess"
        return np.resize(known[guess : guess + most], most)

    def _begin(self, row_id: int, stay_id: int, num_known: int) -> None:
        """The row has another sequence than before."""
        self._stay_ids[row_id], self._num_seen[row_id] = stay_id, num_known
        self._luck.begin(row_id)
        self._index.begin(row_id, num_known)
        self._guesses[row_id] = _NO_GUESS
        self._look_up(row_id, least=1)

    def _take(self, row_id: int, position: int) -> None:
        """The token at `position` is the next one."""
        self._index.add(row_id)
        guess, kind, length = self._guesses[row_id], self._kinds[row_id], self._lengths[row_id]
        if guess == _NO_GUESS:
            self._look_up(row_id, least=1)
            return
        tokens = self._rows.token_ids
        is_right = bool(tokens[row_id, guess] == tokens[row_id, position])
        self._luck.add(row_id, kind, is_right)
        if is_right:
            length = min(length + 1, LONGEST)
            self._guess(row_id, guess + 1, KIND_OF_LENGTH[length], length)
            if length < NUM_MATCHED:
                self._look_up(row_id, least=length + 1)
            return
        self._guesses[row_id] = _NO_GUESS
        if length > NUM_MATCHED and kind != BEHIND_CHANGE:
            # As long as it was, should it go on.
            self._guess(row_id, guess + 1, BEHIND_CHANGE, length)
        self._look_up(row_id, least=1)

    def _guess(self, row_id: int, position: int, kind: int, length: int) -> None:
        self._guesses[row_id] = position
        self._kinds[row_id], self._lengths[row_id] = kind, length

    def _look_up(self, row_id: int, least: int) -> None:
        """Takes a match of `least` tokens or more, but not for a changed copy of better luck."""
        found = self._index.find(row_id, least)
        if found is None:
            return
        position, length = found
        kind, luck = KIND_OF_LENGTH[length], self._luck
        has_change = self._guesses[row_id] != _NO_GUESS and self._kinds[row_id] == BEHIND_CHANGE
        if not has_change or luck.mean(row_id, kind) > luck.mean(row_id, BEHIND_CHANGE):
            self._guess(row_id, position, kind, length)
