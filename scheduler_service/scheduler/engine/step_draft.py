"""Draft of the next step, and departures: what left the rows while steps in flight concern it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.scheduler.values import AdmissionBlocker, BlockMoves, Note, Request, Sequence


class StepDraft:
    """Decisions made since the last step was planned; they become part of the next step.

    `removed_row_ids`, `new_rows`: changes of the executor's row table (the growth of block tables
    is kept in `RowColumns`). `moves`: block copies between pools and within the device.
    `published`: blocks, by stay, that are findable in the prefix cache although this step is still
    to fill them; blocks that moves fill are under NO_STAY. `pinned_device_blocks`,
    `pinned_host_blocks`: blocks that the moves read or write. `has_swapped_in`, `has_swapped_out`:
    a request was swapped; one step never does both. `yielded_tenants`: tenants of requests
    preempted since the planner last began to fill the step. `notes`: what was done to requests.
    `blockers`: requests that could not begin when the step was last filled, and why.
    `wanted_adapters`: adapters of waiting requests that were looked at then, which stay loaded.
    """

    # No dataclass: every step makes a draft, and default factories take twice as long.
    __slots__ = (
        "blockers",
        "has_swapped_in",
        "has_swapped_out",
        "moves",
        "new_rows",
        "notes",
        "pinned_device_blocks",
        "pinned_host_blocks",
        "published",
        "removed_row_ids",
        "wanted_adapters",
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
        self.blockers: dict[Request, AdmissionBlocker] = {}
        self.wanted_adapters: set[str] = set()

    @property
    def has_preempted(self) -> bool:
        """Whether a request was preempted since the planner last began to fill the step."""
        return bool(self.yielded_tenants)

    def add_row(self, sequence: Sequence) -> None:
        """Notes a sequence that got a row; its block table is read when the step is planned."""
        self.new_rows[sequence.row_id] = sequence

    def remove_row(self, row_id: int) -> None:
        """Notes that a row was vacated.

        A row that the executor was never told of need not be removed there.
        """
        if self.new_rows.pop(row_id, None) is None:
            self.removed_row_ids.append(row_id)


# -- Departures ------------------------------------------------------------------------------------
#
# Sequences and parts of block tables that left the rows while steps in flight still concern them.
# Results of these steps belong to the sequences. If one of the steps fails, every sequence that had
# a block which the step was to write is lost, even if the block or the whole row is gone by then.


@dataclass(frozen=True, slots=True)
class TablePart:
    """Block ids of one stay of a sequence in a row.

    `blocks`: part of the block table, from logical block `first_index` on. `cross_blocks`: blocks
    of the encoder's keys and values. `request_id`: the request that had the row. `last_step_id`:
    the latest step that had the row with these blocks. `encodes`: whether a step without a result
    fills the cross blocks.
    """

    request_id: str
    stay_id: int
    first_index: int
    blocks: Items[int]
    cross_blocks: Items[int]
    last_step_id: int
    encodes: bool = False


class Departures:
    """Sequences and blocks that left the rows while steps in flight still concern them.

    `sequences`: by stay, sequences that still get results. `table_parts`: blocks given back.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.table_parts: list[TablePart] = []

    def __bool__(self) -> bool:
        return bool(self.sequences or self.table_parts)

    def expect_results(self, sequence: Sequence, part: TablePart) -> None:
        """Notes that a sequence left its row and still gets results of steps in flight.

        Mutates `sequence.settles_at_step`.
        """
        self.sequences[part.stay_id] = sequence
        sequence.settles_at_step = part.last_step_id

    def ignore_results(self, sequence: Sequence) -> None:
        """Drops the results that steps in flight would bring a sequence. Mutates the sequence."""
        if sequence.settles_at_step:
            sequence.settles_at_step = 0
            self.sequences = {t: s for t, s in self.sequences.items() if s is not sequence}

    def step_answered(self, step_id: int) -> None:
        """Forgets sequences and blocks that only waited for the result of `step_id`."""
        self.table_parts = [part for part in self.table_parts if part.last_step_id > step_id]
        self.sequences = {t: s for t, s in self.sequences.items() if s.settles_at_step > step_id}
