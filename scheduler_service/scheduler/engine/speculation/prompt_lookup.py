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
from typing import Any, Protocol

import numpy as np

from scheduler_service.scheduler.engine.row_columns import NO_STAY, RowColumns
from scheduler_service.scheduler.engine.speculation.draft_lengths import Float64Array
from scheduler_service.scheduler.values.request import Int32Array, Int64Array

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


# -- Whoever guesses what follows the tokens of rows -----------------------------------------------


class Proposer(Protocol):
    """Guesses the next tokens of rows by those that are known.

    It never says when to guess: whether that pays is found from how often guesses were right. That
    is learned of all rows, whether somebody used the guesses or not, so a row that begins to repeat
    itself is noticed.
    """

    def look(self, row_ids: Int64Array) -> list[int]:
        """Reads what these rows have got since it was asked last; those that have a guess now."""
        ...

    def chances(self, row_ids: Sequence[int], most: int) -> Float64Array:
        """For rows [K] that have a guess, [K, `most`]: how probably so many guesses are all right.

        By what became of those before.
        """
        ...

    def propose(self, row_id: int, most: int) -> Int32Array:
        """The next tokens of a row that has a guess, [`most`]."""
        ...


# -- How often guesses were right, by what is known of them when they are made ---------------------
#
# A copy that has been right for long will go on, the first guess after a match of one token may be
# right or not: one mean of both would make drafts too short for the one, too long for the other. So
# each row has a mean for each kind of guess, and a draft goes through several kinds: what follows a
# right guess is a longer copy.
#
# Shape letters: K rows, D guesses of each, S kinds.

# Copies are told apart up to this length, in tokens that are the same.
LONGEST = 16
# Behind a token that was changed in a copy, which may go on.
BEHIND_CHANGE = 0
# The kind of a guess by the length of the copy: of 1, 2, 3, 4 to 7, 8 to 15 tokens, of more.
_KINDS = np.array([1, 1, 2, 3, *[4] * 4, *[5] * 8, 6], np.int64)
KIND_OF_LENGTH: tuple[int, ...] = tuple(_KINDS.tolist())
# What is assumed of each kind in a row of which nothing is known; that counts as much as so many
# guesses. Later ones are forgotten: that many count.
_ASSUMED = (0.5, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92)
_ASSUMED_WEIGHT = 3
_MOST_COUNTED = 20


class GuessLuck:
    """Of each row, by kind, the mean of guesses: 1 if right, or 0."""

    def __init__(self, max_num_rows: int) -> None:
        self._means = [list(_ASSUMED) for _ in range(max_num_rows)]
        self._counts = [[0] * len(_ASSUMED) for _ in range(max_num_rows)]

    def begin(self, row_id: int) -> None:
        """Nothing is known of the row any more."""
        self._means[row_id] = list(_ASSUMED)
        self._counts[row_id] = [0] * len(_ASSUMED)

    def add(self, row_id: int, kind: int, is_right: bool) -> None:
        """A guess of that kind was right, or not."""
        means, counts = self._means[row_id], self._counts[row_id]
        counts[kind] = min(counts[kind] + 1, _MOST_COUNTED)
        means[kind] += (is_right - means[kind]) / (_ASSUMED_WEIGHT + counts[kind])

    def mean(self, row_id: int, kind: int) -> float:
        """How probably a guess of that kind is right."""
        return self._means[row_id][kind]

    def chances(
        self, row_ids: Sequence[int], kinds: Sequence[int], lengths: Sequence[int], most: int
    ) -> Float64Array:
        """[K, `most`]: how probably the first of its guesses are all right, for each number.

        `kinds`, `lengths`: [K] each, of the first guess, and of the copy that it would continue.
        """
        means = np.array([self._means[row_id] for row_id in row_ids])
        later = np.array(lengths, np.int64)[:, None] + np.arange(most)
        path = _KINDS[np.minimum(later, LONGEST)]
        path[:, :1] = np.array(kinds)[:, None]
        chances: Float64Array = np.cumprod(np.take_along_axis(means, path, axis=1), axis=1)
        return chances


# -- Where the last tokens of a row came before ----------------------------------------------------
#
# For one, two and three tokens there is a table for each row, by a hash of the tokens: the position
# after their latest occurrence, where the token is that followed. Tables have a fixed size. What is
# overwritten is forgotten, and what is found is compared with the tokens themselves. All of it
# follows from the tokens, so tables are not part of a dumped core, but made again.
#
# Shape letters: N rows, S places of a table.

# Tokens that are looked for together, at most.
NUM_MATCHED = 3
# 192 KiB a row.
_MOST_PLACES = 2**14
_UNSEEN = 0
# Odd numbers; what they are matters little.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MIXER = 0x27D4EB2F
_HASH_BITS = 32
_HASH = 2**_HASH_BITS - 1


class TokenIndex:
    """See the top of this file. Reads the tokens of `rows`, which know nothing of it."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        max_num_rows, max_len = rows.token_ids.shape
        num_place_bits = min((2 * max_len - 1).bit_length(), _MOST_PLACES.bit_length() - 1)
        self._shift = _HASH_BITS - num_place_bits
        # Tokens of each row that are known here, and the places of those before the next one.
        self._ends = [0] * max_num_rows
        self._next_places: list[list[int]] = [[] for _ in range(max_num_rows)]
        self._make_tables()

    def _make_tables(self) -> None:
        # [N, 3 S]; positions are never 0.
        self._num_places = 2 ** (_HASH_BITS - self._shift)
        shape = len(self._ends), NUM_MATCHED * self._num_places
        self._tables = np.zeros(shape, np.int32)
        # Single elements of these are Python integers, and come four times as fast.
        self._places = self._tables.data
        self._tokens = self._rows.token_ids.data

    def __getstate__(self) -> dict[str, Any]:
        made_again = {"_tables", "_places", "_tokens"}
        return {name: value for name, value in vars(self).items() if name not in made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_tables()
        for row_id, end in enumerate(self._ends):
            # Of a row that is free, or another sequence's by now, nothing is asked any more.
            self._index(row_id, end)

    def begin(self, row_id: int, num_tokens: int) -> None:
        """The row has another sequence, of which so many tokens are known."""
        self._tables[row_id] = _UNSEEN
        self._index(row_id, num_tokens)
        self._go_to(row_id, num_tokens)

    def add(self, row_id: int) -> None:
        """The next token of the row is known."""
        end = self._ends[row_id]
        for place in self._next_places[row_id]:
            self._places[row_id, place] = end
        self._go_to(row_id, end + 1)

    def find(self, row_id: int, least: int) -> tuple[int, int] | None:
        """What followed the last tokens before: at which position, and how many are the same.

        The latest occurrence of the last three tokens or, failing that, of two, of one; of `least`.
        No more than three are counted.
        """
        end, tokens, places = self._ends[row_id], self._tokens, self._next_places[row_id]
        for num_tokens in range(len(places), least - 1, -1):
            found: int = self._places[row_id, places[num_tokens - 1]]
            if found != _UNSEEN and all(
                tokens[row_id, found - back] == tokens[row_id, end - back]
                for back in range(1, num_tokens + 1)
            ):
                return found, num_tokens
        return None

    def _go_to(self, row_id: int, end: int) -> None:
        """The next token is that at `end`: finds the places of those before it."""
        tokens, mixed, places = self._tokens, 0, []
        for back in range(1, min(NUM_MATCHED, end) + 1):
            mixed += _FACTORS[back - 1] * tokens[row_id, end - back]
            place = (mixed * _MIXER & _HASH) >> self._shift
            places.append((back - 1) * self._num_places + place)
        self._ends[row_id], self._next_places[row_id] = end, places

    def _index(self, row_id: int, end: int) -> None:
        """The same as to add the tokens before `end` one by one."""
        tokens, table = self._rows.token_ids[row_id, :end].astype(np.uint32), self._tables[row_id]
        mixed = np.zeros(max(end - 1, 0), np.uint32)
        for num_tokens in range(1, min(NUM_MATCHED, end - 1) + 1):
            # Of what comes before the positions from `num_tokens` on.
            mixed = mixed[-(end - num_tokens) :] + (
                np.uint32(_FACTORS[num_tokens - 1]) * tokens[: end - num_tokens]
            )
            places = mixed * np.uint32(_MIXER) >> np.uint32(self._shift)
            # Of the same place, the last one stays.
            table[(num_tokens - 1) * self._num_places + places] = np.arange(num_tokens, end)
