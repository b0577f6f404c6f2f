"""What a step must tell the executor about its row table."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.request import Sequence


@dataclass(slots=True)
class TableWrites:
    """Blocks that were added to tables of rows the executor knows; see the proto.

    Write i gives row `row_ids[i]` the next `counts[i]` of `block_ids` from `start_indexes[i]` on.
    """

    row_ids: list[int] = field(default_factory=list)
    start_indexes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self.row_ids

    def __bool__(self) -> bool:
        return bool(self.row_ids)

    def add(self, row_id: int, start_index: int, block_ids: list[int]) -> None:
        """A table has grown, perhaps once more: a row has one write."""
        earlier = self.drop(row_id)
        start_index -= len(earlier)
        block_ids = earlier + block_ids
        self.row_ids.append(row_id)
        self.start_indexes.append(start_index)
        self.counts.append(len(block_ids))
        self.block_ids += block_ids

    def add_each(self, row_ids: list[int], start_indexes: list[int], block_ids: list[int]) -> None:
        """Tables of rows without a write have grown by one block each."""
        self.row_ids += row_ids
        self.start_indexes += start_indexes
        self.counts += [1] * len(row_ids)
        self.block_ids += block_ids

    def shorten(self, row_id: int) -> None:
        """The table of a row has lost its last block, which perhaps was still to be written."""
        if row_id not in self.row_ids:
            return
        if self.counts[index := self.row_ids.index(row_id)] == 1:
            self.drop(row_id)
            return
        self.counts[index] -= 1
        del self.block_ids[sum(self.counts[: index + 1])]

    def drop(self, row_id: int) -> list[int]:
        """Forgets the write of a row, if there is one, and returns its blocks."""
        if row_id not in self.row_ids:
            return []
        index = self.row_ids.index(row_id)
        start = sum(self.counts[:index])
        end = start + self.counts[index]
        block_ids = self.block_ids[start:end]
        del self.row_ids[index], self.start_indexes[index], self.counts[index]
        del self.block_ids[start:end]
        return block_ids


@dataclass(slots=True)
class RowChanges:
    """Rows removed, rows added, and blocks added to tables of rows the executor knows."""

    removed_row_ids: list[int] = field(default_factory=list)
    new: dict[int, Sequence] = field(default_factory=dict)
    table_writes: TableWrites = field(default_factory=TableWrites)

    def add(self, sequence: Sequence) -> None:
        """The sequence has got its row; its table is read when the step is planned."""
        self.new[sequence.row_id] = sequence

    def remove(self, row_id: int) -> None:
        """The row is gone. What the executor was never told need not be taken back."""
        self.table_writes.drop(row_id)
        if self.new.pop(row_id, None) is None:
            self.removed_row_ids.append(row_id)

    def extend(self, row_id: int, start_index: int, block_ids: list[int]) -> None:
        """The table of a row has grown."""
        if row_id not in self.new:
            self.table_writes.add(row_id, start_index, block_ids)
