"""The next step while it is being decided."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.plan import BlockMoves, Note
from scheduler_service.scheduler.values.request import Request, Sequence


class StepDraft:
    """What was decided since the last step was planned, and is part of the next one.

    `removed_row_ids`, `new_rows`: changes of the executor's row table; what tables have grown by,
    the columns know. `published`: by stay, blocks that are findable and that the step is to
    fill; by moves, those of NO_STAY. `pinned_device_blocks`, `pinned_host_blocks`: its moves
    read or write them. `has_swapped_in`, `has_swapped_out`: a request was; a step does not do both.
    `yielded_tenants`: of whoever was preempted since the step was last begun to be filled.
    `notes`, `lacks`: what was done, and who could not begin when it was last filled.
    """

    # Written out: every step makes one, and the factories of a dataclass take twice as long.
    __slots__ = (
        "has_swapped_in",
        "has_swapped_out",
        "lacks",
        "moves",
        "new_rows",
        "notes",
        "pinned_device_blocks",
        "pinned_host_blocks",
        "published",
        "removed_row_ids",
        "yielded_tenants",
    )

    def __init__(self) -> None:
        self.removed_row_ids: list[int] = []
        self.new_rows: dict[int, Sequence] = {}
        self.moves = BlockMoves()
        self.published: dict[int, list[int]] = {}
        self.pinned_device_blocks: list[int] = []
        self.pinned_host_blocks: list[int] = []
        self.has_swapped_in = False
        self.has_swapped_out = False
        self.yielded_tenants: set[str] = set()
        self.notes: list[Note] = []
        self.lacks: dict[Request, AdmissionBlocker] = {}

    @property
    def has_preempted(self) -> bool:
        """Whether somebody was preempted since the step was last begun to be filled."""
        return bool(self.yielded_tenants)

    def add_row(self, sequence: Sequence) -> None:
        """The sequence has got its row; its table is read when the step is planned."""
        self.new_rows[sequence.row_id] = sequence

    def remove_row(self, row_id: int) -> None:
        """The row is gone. What the executor was never told need not be taken back."""
        if self.new_rows.pop(row_id, None) is None:
            self.removed_row_ids.append(row_id)


# --------------------------------------------------------------------------------------------------
# What left the rows while steps in flight still concern it: sequences, and parts of block tables.
#
# Results of these steps belong to the sequences. And if one of the steps fails, whoever had a block
# that it was to write has leaned on it, even if the block or the whole row is gone by then.


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
