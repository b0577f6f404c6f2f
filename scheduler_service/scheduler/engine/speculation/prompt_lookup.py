"""Prompt lookup: guesses the tokens that followed the row's last tokens earlier in the same row.

A row is assumed to copy itself, from behind the latest occurrence of its last three tokens, or else
of its last two or one. A copy whose guess was right continues, so a long copy is followed even
where three tokens alone are ambiguous; only a copy shorter than that gives way to a longer match.
Where a longer copy was wrong, a single token may have been changed. So the text behind that token
in the copied passage is a guess, too, and the acceptance rates decide between the two.

Guesses are compared with the new tokens one by one, whether the guesses were used or not. So the
state follows from the tokens that a row had when it came, and those that it got since, however many
came together.

The code is plain Python: a few microseconds per token, which numpy operations on arrays of a few
rows do not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from scheduler_service.scheduler.engine.row_columns import NO_STAY, RowColumns
from scheduler_service.scheduler.engine.speculation.draft_lengths import Float64Array
from scheduler_service.scheduler.values import Int32Array, Int64Array

_NO_GUESS = -1


class PromptLookup:
    """Proposer that copies earlier text of the same row; see the module docstring."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        self._index = TokenIndex(rows)
        self._acceptance = AcceptanceRates(rows.max_num_rows)
        self._stay_ids = [NO_STAY] * rows.max_num_rows
        self._num_seen = [0] * rows.max_num_rows
        # By row: position of the token guessed next, kind of the guess, and length of the copy.
        self._guesses = [_NO_GUESS] * rows.max_num_rows
        self._kinds = [BEHIND_CHANGE] * rows.max_num_rows
        self._lengths = [0] * rows.max_num_rows

    def look(self, row_ids: Int64Array) -> list[int]:
        """Reads new tokens of these rows; see Proposer. Takes time in proportion to new tokens."""
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
        """Returns the probabilities that guesses are right; see Proposer."""
        kinds = [self._kinds[row_id] for row_id in row_ids]
        lengths = [self._lengths[row_id] for row_id in row_ids]
        return self._acceptance.chances(row_ids, kinds, lengths, most)

    def propose(self, row_id: int, most: int) -> Int32Array:
        """Returns the guessed tokens; see Proposer. Repeats them where the copy reaches its end."""
        known = self._rows.known_tokens(row_id)
        guess = self._guesses[row_id]
        assert 0 <= guess < len(known), "the row has no guess"
        return np.resize(known[guess : guess + most], most)

    def _begin(self, row_id: int, stay_id: int, num_known: int) -> None:
        """Resets the row, which has another sequence than before."""
        self._stay_ids[row_id], self._num_seen[row_id] = stay_id, num_known
        self._acceptance.begin(row_id)
        self._index.begin(row_id, num_known)
        self._guesses[row_id] = _NO_GUESS
        self._look_up(row_id, least=1)

    def _take(self, row_id: int, position: int) -> None:
        """Compares a row's guess with its next token, at `position`; makes the next guess."""
        self._index.add(row_id)
        guess, kind, length = self._guesses[row_id], self._kinds[row_id], self._lengths[row_id]
        if guess == _NO_GUESS:
            self._look_up(row_id, least=1)
            return
        tokens = self._rows.token_ids
        is_right = bool(tokens[row_id, guess] == tokens[row_id, position])
        self._acceptance.add(row_id, kind, is_right)
        if is_right:
            length = min(length + 1, LONGEST)
            self._guess(row_id, guess + 1, KIND_OF_LENGTH[length], length)
            if length < NUM_MATCHED:
                self._look_up(row_id, least=length + 1)
            return
        self._guesses[row_id] = _NO_GUESS
        if length > NUM_MATCHED and kind != BEHIND_CHANGE:
            # Keeps the length of the copy, in case the copy continues behind the changed token.
            self._guess(row_id, guess + 1, BEHIND_CHANGE, length)
        self._look_up(row_id, least=1)

    def _guess(self, row_id: int, position: int, kind: int, length: int) -> None:
        self._guesses[row_id] = position
        self._kinds[row_id], self._lengths[row_id] = kind, length

    def _look_up(self, row_id: int, least: int) -> None:
        """Takes a match of at least `least` tokens, unless a changed copy has a better rate."""
        found = self._index.find(row_id, least)
        if found is None:
            return
        position, length = found
        kind, acceptance = KIND_OF_LENGTH[length], self._acceptance
        has_change = self._guesses[row_id] != _NO_GUESS and self._kinds[row_id] == BEHIND_CHANGE
        if not has_change or acceptance.mean(row_id, kind) > acceptance.mean(row_id, BEHIND_CHANGE):
            self._guess(row_id, position, kind, length)


# -- Proposers -------------------------------------------------------------------------------------


class Proposer(Protocol):
    """Proposes draft tokens of rows from known tokens.

    A proposer does not decide when to use guesses: whether that pays follows from their acceptance
    rates. The rates are learned from all rows, whether guesses were used or not, so that a row
    which begins to repeat itself is noticed.
    """

    def look(self, row_ids: Int64Array) -> list[int]:
        """Reads the tokens that rows got since the last call; returns the rows with a guess."""
        ...

    def chances(self, row_ids: Sequence[int], most: int) -> Float64Array:
        """Returns how probably the first guesses of rows [K] are all right: [K, `most`] float64.

        Column d is for the first d + 1 guesses, estimated from the results of earlier ones. Each
        row must have a guess.
        """
        ...

    def propose(self, row_id: int, most: int) -> Int32Array:
        """Returns the next `most` tokens guessed for a row that has a guess: [`most`] int32."""
        ...


# -- Acceptance rates of guesses -------------------------------------------------------------------
#
# A copy that was right for long will probably go on, while the first guess after a match of one
# token is uncertain. A common mean would make drafts too short for the former and too long for the
# latter. So each row has a mean for each kind of guess, and the guesses of one draft are of several
# kinds: a right guess makes the copy longer.
#
# Shape letters: K rows, D guesses of each, S kinds.

# Copies with this many matching tokens or more count as equally long.
LONGEST = 16
# Kind of a guess behind a changed token of a copy that may go on.
BEHIND_CHANGE = 0
# Kind of a guess by the length of the copy: 1, 2, 3, 4 to 7, 8 to 15, or more tokens.
_KINDS = np.array([1, 1, 2, 3, *[4] * 4, *[5] * 8, 6], np.int64)
KIND_OF_LENGTH: tuple[int, ...] = tuple(_KINDS.tolist())
# Acceptance rate of each kind assumed for a new row; it weighs as much as _ASSUMED_WEIGHT guesses.
# Older guesses fade out: about _MOST_COUNTED of them count.
_ASSUMED = (0.5, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92)
_ASSUMED_WEIGHT = 3
_MOST_COUNTED = 20


class AcceptanceRates:
    """Acceptance rate of the guesses of each row, by kind."""

    def __init__(self, max_num_rows: int) -> None:
        self._means = [list(_ASSUMED) for _ in range(max_num_rows)]
        self._counts = [[0] * len(_ASSUMED) for _ in range(max_num_rows)]

    def begin(self, row_id: int) -> None:
        """Resets the rates of a row to the assumed ones."""
        self._means[row_id] = list(_ASSUMED)
        self._counts[row_id] = [0] * len(_ASSUMED)

    def add(self, row_id: int, kind: int, is_right: bool) -> None:
        """Counts a guess of `kind` that was right or wrong."""
        means, counts = self._means[row_id], self._counts[row_id]
        counts[kind] = min(counts[kind] + 1, _MOST_COUNTED)
        means[kind] += (is_right - means[kind]) / (_ASSUMED_WEIGHT + counts[kind])

    def mean(self, row_id: int, kind: int) -> float:
        """Returns the acceptance rate of guesses of `kind` in a row."""
        return self._means[row_id][kind]

    def chances(
        self, row_ids: Sequence[int], kinds: Sequence[int], lengths: Sequence[int], most: int
    ) -> Float64Array:
        """Returns how probably the first guesses of rows are all right: [K, `most`] float64.

        Column d is for the first d + 1 guesses. `kinds`, `lengths`: [K] each, the kind of the first
        guess, and the length of the copy that it would continue.
        """
        means = np.array([self._means[row_id] for row_id in row_ids])
        later = np.array(lengths, np.int64)[:, None] + np.arange(most)
        path = _KINDS[np.minimum(later, LONGEST)]
        path[:, :1] = np.array(kinds)[:, None]
        chances: Float64Array = np.cumprod(np.take_along_axis(means, path, axis=1), axis=1)
        return chances


# -- Index of earlier occurrences ------------------------------------------------------------------
#
# Each row has a hash table for one, two and three tokens: it maps the hash of the tokens to the
# position behind their latest occurrence, where the token that followed is. Tables have a fixed
# size: overwritten entries are lost, and an entry found is compared with the tokens themselves.
# Tables follow from the tokens, so a dumped engine leaves them out and makes them again.
#
# Shape letters: N rows, S slots of a table.

# Most tokens that are looked up together.
NUM_MATCHED = 3
# Makes 192 KiB per row.
_MOST_PLACES = 2**14
_UNSEEN = 0
# Any large odd numbers.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MIXER = 0x27D4EB2F
_HASH_BITS = 32
_HASH = 2**_HASH_BITS - 1


class TokenIndex:
    """Index of earlier occurrences of the last tokens of each row; reads the tokens of `rows`."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        max_num_rows, max_len = rows.token_ids.shape
        num_place_bits = min((2 * max_len - 1).bit_length(), _MOST_PLACES.bit_length() - 1)
        self._shift = _HASH_BITS - num_place_bits
        # Number of indexed tokens of each row, and the table slots of the last tokens among them.
        self._ends = [0] * max_num_rows
        self._next_slots: list[list[int]] = [[] for _ in range(max_num_rows)]
        self._make_tables()

    def _make_tables(self) -> None:
        # [N, 3 S]; positions are never 0.
        self._num_slots = 2 ** (_HASH_BITS - self._shift)
        shape = len(self._ends), NUM_MATCHED * self._num_slots
        self._tables = np.zeros(shape, np.int32)
        # Elements of a memoryview are Python integers, and four times as fast to read as numpy's.
        self._slots = self._tables.data
        self._tokens = self._rows.token_ids.data

    def __getstate__(self) -> dict[str, Any]:
        made_again = {"_tables", "_slots", "_tokens"}
        return {name: value for name, value in vars(self).items() if name not in made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_tables()
        for row_id, end in enumerate(self._ends):
            # Also for free rows and rows with a new sequence: nothing reads their old entries.
            self._index(row_id, end)

    def begin(self, row_id: int, num_tokens: int) -> None:
        """Indexes the `num_tokens` known tokens of a sequence that is new in the row."""
        self._tables[row_id] = _UNSEEN
        self._index(row_id, num_tokens)
        self._go_to(row_id, num_tokens)

    def add(self, row_id: int) -> None:
        """Adds the next token of the row."""
        end = self._ends[row_id]
        for slot in self._next_slots[row_id]:
            self._slots[row_id, slot] = end
        self._go_to(row_id, end + 1)

    def find(self, row_id: int, least: int) -> tuple[int, int] | None:
        """Returns the position behind the latest earlier occurrence of the row's last tokens.

        Also returns the number of matching tokens: three, or else two or one, and at least `least`.
        None if there is no such match.
        """
        end, tokens, slots = self._ends[row_id], self._tokens, self._next_slots[row_id]
        for num_tokens in range(len(slots), least - 1, -1):
            found: int = self._slots[row_id, slots[num_tokens - 1]]
            if found != _UNSEEN and all(
                tokens[row_id, found - back] == tokens[row_id, end - back]
                for back in range(1, num_tokens + 1)
            ):
                return found, num_tokens
        return None

    def _go_to(self, row_id: int, end: int) -> None:
        """Sets the number of indexed tokens to `end`, and finds the places of the last ones."""
        tokens, mixed, slots = self._tokens, 0, []
        for back in range(1, min(NUM_MATCHED, end) + 1):
            mixed += _FACTORS[back - 1] * tokens[row_id, end - back]
            slot = (mixed * _MIXER & _HASH) >> self._shift
            slots.append((back - 1) * self._num_slots + slot)
        self._ends[row_id], self._next_slots[row_id] = end, slots

    def _index(self, row_id: int, end: int) -> None:
        """Fills the tables as if the tokens before `end` were added one by one."""
        tokens, table = self._rows.token_ids[row_id, :end].astype(np.uint32), self._tables[row_id]
        mixed = np.zeros(max(end - 1, 0), np.uint32)
        for num_tokens in range(1, min(NUM_MATCHED, end - 1) + 1):
            # Hashes of the tokens before each position from `num_tokens` on.
            mixed = mixed[-(end - num_tokens) :] + (
                np.uint32(_FACTORS[num_tokens - 1]) * tokens[: end - num_tokens]
            )
            slots = mixed * np.uint32(_MIXER) >> np.uint32(self._shift)
            # Of positions with the same slot, the last one stays.
            table[(num_tokens - 1) * self._num_slots + slots] = np.arange(num_tokens, end)
