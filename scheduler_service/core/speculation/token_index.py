"""Where the last tokens of a row came before.

For one, two and three tokens there is a table for each row, by a hash of the tokens: the position
after their latest occurrence, where the token is that followed. Tables have a fixed size. What is
overwritten is forgotten, and what is found is compared with the tokens themselves. All of it
follows from the tokens, so tables are not part of a dumped core, but made again.

Shape letters: N rows, S places of a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler_service.core.row_columns import RowColumns

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
