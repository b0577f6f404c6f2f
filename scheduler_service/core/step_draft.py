"""The next step while it is being decided."""

from __future__ import annotations

from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.core.notes import Note
from scheduler_service.core.plan import BlockMoves
from scheduler_service.core.request import Request, Sequence


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
