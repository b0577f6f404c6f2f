"""What left the rows while steps in flight still concern it: sequences, and parts of block tables.

Results of these steps belong to the sequences. And if one of the steps fails, whoever had a block
that it was to write has leaned on it, even if the block or the whole row is gone by then.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.core.request import Sequence


@dataclass(frozen=True, slots=True)
class TablePart:
    """Blocks that a stay in a row has or had: from `first_index` of its table on, and cross blocks.

    `request_id`: of the request that had the row. `last_step_id`: the latest step that had the row
    with these blocks.
    """

    request_id: str
    stay_id: int
    first_index: int
    blocks: Items[int]
    cross_blocks: Items[int]
    last_step_id: int


class Departures:
    """`sequences`, by stay: those that still get results. `table_parts`: given back."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.table_parts: list[TablePart] = []

    def __bool__(self) -> bool:
        return bool(self.sequences or self.table_parts)

    def expect_results(self, sequence: Sequence, part: TablePart) -> None:
        """The sequence has left its row; what steps in flight sample is its own. Mutates it."""
        self.sequences[part.stay_id] = sequence
        sequence.settles_at_step = part.last_step_id

    def ignore_results(self, sequence: Sequence) -> None:
        """No step in flight concerns the sequence any more. Mutates it."""
        if sequence.settles_at_step:
            sequence.settles_at_step = 0
            self.sequences = {t: s for t, s in self.sequences.items() if s is not sequence}

    def step_answered(self, step_id: int) -> None:
        """Forgets what only waited for `step_id`."""
        self.table_parts = [part for part in self.table_parts if part.last_step_id > step_id]
        self.sequences = {t: s for t, s in self.sequences.items() if s.settles_at_step > step_id}
