"""What a step must tell the executor: changes of its row table, and block pairs to move."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.request import Int32Array, Sequence


@dataclass(slots=True)
class TableWrites:
    """Blocks that were added to tables of rows the executor knows; see the proto.

    Write i gives row `row_ids[i]` the next `counts[i]` of `block_ids` from `start_indexes[i]` on.
    """

    row_ids: Int32Array
    start_indexes: Int32Array
    counts: Int32Array
    block_ids: Int32Array

    def __bool__(self) -> bool:
        return len(self.row_ids) > 0


@dataclass(slots=True)
class RowChanges:
    """Rows removed and rows added. What tables have grown by, the columns know."""

    removed_row_ids: list[int] = field(default_factory=list)
    new: dict[int, Sequence] = field(default_factory=dict)

    def add(self, sequence: Sequence) -> None:
        """The sequence has got its row; its table is read when the step is planned."""
        self.new[sequence.row_id] = sequence

    def remove(self, row_id: int) -> None:
        """The row is gone. What the executor was never told need not be taken back."""
        if self.new.pop(row_id, None) is None:
            self.removed_row_ids.append(row_id)


@dataclass(slots=True)
class BlockMoves:
    """(source, destination) pairs of the three phases; see `BlockMoves` in the proto."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy)

    def __len__(self) -> int:
        return len(self.swap_out) + len(self.swap_in) + len(self.copy)

    @property
    def device_destinations(self) -> set[int]:
        """Device blocks that are overwritten."""
        return {destination for _, destination in [*self.swap_in, *self.copy]}

    @property
    def host_destinations(self) -> set[int]:
        """Host blocks that are overwritten."""
        return {destination for _, destination in self.swap_out}
