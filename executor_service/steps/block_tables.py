"""Block tables of all rows, with a record of recent writes.

A device that keeps a copy of the tables gets only the changes. Nothing depends on the device having
received them: it asks again for changes that it missed.

Shape letters: N row ids, C blocks the tables have room for (grows), R rows of a step, W blocks of
their longest table, E entries that have changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]
_Indexes = npt.NDArray[np.integer[Any]]

_NO_BLOCK = -1
_INITIAL_CAPACITY = 16
# A reader that missed more writes than that gets all tables. A step makes one or two writes.
_NUM_REMEMBERED = 64
# Version of a reader that has seen no table yet.
NOTHING_SEEN = -1


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changed entries: `block_ids[i]` is at `indexes[i]` in the table of `row_ids[i]`; [E] each.

    An entry may occur twice, with the same block both times. `version`: the version of the tables.
    """

    row_ids: _Int64s
    indexes: _Int64s
    block_ids: _Int32s
    version: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Written parts of tables: `counts` entries from `starts` on, for each of `row_ids`."""

    row_ids: _Int64s
    starts: _Int32s
    counts: _Int32s


class BlockTables:
    """Block tables by row id. Methods do not check their arguments: the batch was checked before.

    `lengths`: [N] int32. `last_missing`: [N] int32, the last index of a table whose entry is -1; it
    is -1 for a table without such an entry.
    """

    def __init__(self, num_rows: int) -> None:
        """Creates N = `num_rows` empty tables."""
        self.lengths: _Int32s = np.zeros(num_rows, np.int32)
        self.last_missing: _Int32s = np.full(num_rows, -1, np.int32)
        self._knows_missing = False
        self._tables = np.full((num_rows, _INITIAL_CAPACITY), _NO_BLOCK, np.int32)
        self._num_writes = 0
        # The latest writes; None until a reader asks for changes.
        self._written: deque[_Span] | None = None

    @classmethod
    def of(cls, tables: _Int32s) -> BlockTables:
        """Returns block tables in which the row ids 0 .. R - 1 have `tables` [R, W]."""
        num_rows, width = tables.shape
        made, row_ids = cls(num_rows), np.arange(num_rows, dtype=np.int32)
        offsets = np.arange(num_rows + 1, dtype=np.int32) * width
        made.write(row_ids, np.zeros_like(row_ids), offsets, tables.ravel())
        return made

    @property
    def num_rows(self) -> int:
        """Number of row ids, N."""
        return len(self.lengths)

    def of_rows(self, row_ids: _Int32s) -> _Int32s:
        """Returns a copy of the tables of `row_ids` [R]: [R, W], padded with -1."""
        if len(row_ids) == 0:
            return np.empty((0, 0), np.int32)
        width = int(np.maximum.reduce(self.lengths.take(row_ids)))
        tables: _Int32s = self._tables[row_ids, :width]
        return tables

    def of_row(self, row_id: int) -> _Int32s:
        """Returns the table of one row as a view."""
        table: _Int32s = self._tables[row_id, : self.lengths[row_id]]
        return table

    def changes_since(self, version: int) -> TableChanges:
        """Returns the entries to write over tables of `version`. Removed entries are not listed."""
        if self._written is None:
            self._written = deque(maxlen=_NUM_REMEMBERED)
        num_missed = self._num_writes - version
        if version == NOTHING_SEEN or num_missed > len(self._written):
            row_ids = np.flatnonzero(self.lengths)
            spans = [_Span(row_ids, np.zeros(len(row_ids), np.int32), self.lengths[row_ids])]
        else:
            spans = [self._written[-back] for back in range(num_missed, 0, -1)]
        none = np.empty(0, np.int64)
        row_ids = np.concatenate([none, *(np.repeat(s.row_ids, s.counts) for s in spans)])
        indexes = np.concatenate([none, *(_indexes(s.starts, s.counts) for s in spans)])
        return TableChanges(row_ids, indexes, self._tables[row_ids, indexes], self._num_writes)

    def remove(self, row_ids: _Indexes) -> None:
        """Removes the tables of rows."""
        self.lengths[row_ids] = 0
        self.last_missing[row_ids] = -1
        self._tables[row_ids] = _NO_BLOCK

    def write(
        self, row_ids: _Int32s, starts: _Int32s, offsets: _Int32s, block_ids: _Int32s
    ) -> None:
        """Overwrites and extends tables; the columns are those of `TableWrites` in the proto."""
        if len(row_ids) == 0:
            return
        rows, counts = row_ids.astype(np.intp), offsets[1:] - offsets[:-1]
        ends = starts + counts
        self._grow_to(int(np.maximum.reduce(ends)))
        if np.count_nonzero(counts == 1) == len(counts):
            self._tables[rows, starts] = block_ids
        else:
            self._tables[np.repeat(rows, counts), _indexes(starts, counts)] = block_ids
        self._num_writes += 1
        if self._written is not None:
            # Copied: the column is a view of the message, which would stay in memory with it.
            self._written.append(_Span(rows, starts.copy(), counts))
        self.lengths[rows] = np.maximum(self.lengths.take(rows), ends)
        # Only models with a sliding window have missing blocks.
        self._knows_missing |= bool(np.count_nonzero(block_ids < 0))
        if self._knows_missing:
            for row_id in rows.tolist():
                missing = np.flatnonzero(self.of_row(row_id) < 0)
                self.last_missing[row_id] = missing[-1] if len(missing) else -1

    def _grow_to(self, num_blocks: int) -> None:
        num_rows, capacity = self._tables.shape
        if num_blocks > capacity:
            wider = np.full((num_rows, max(num_blocks, 2 * capacity)), _NO_BLOCK, np.int32)
            wider[:, :capacity] = self._tables
            self._tables = wider


def _indexes(starts: _Int32s, counts: _Int32s) -> _Int64s:
    """Returns the indexes of all entries of spans with `counts` entries from `starts` on."""
    ends = np.cumsum(counts, dtype=np.int64)
    skipped = np.repeat(starts - (ends - counts), counts)
    return np.asarray(np.arange(len(skipped)) + skipped, np.int64)
