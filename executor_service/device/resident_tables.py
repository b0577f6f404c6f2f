"""Block tables that stay on the device: a step sends what has changed in them, and its row ids.

What is written and read here is asked of the compute stream, so steps that were asked before still
find what was there.

Shape letters: N row ids, M blocks of the longest table that a sequence can have, R rows of a pass,
W blocks of the longest table that is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device.uploads import Numbers, Uploads
from executor_service.steps.block_tables import NOTHING_SEEN, BlockTables
from executor_service.steps.step import Int64Array


@dataclass(frozen=True, slots=True)
class ResidentRows:
    """Where the device has the tables of the rows of a pass.

    `tables`: [N + 1, M] int32, on the device. `row_ids`: [R], theirs.
    """

    tables: Tensor
    row_ids: Int64Array

    @property
    def empty_row_id(self) -> int:
        """N: of a row that has block 0 throughout, for rows that nobody asked for."""
        return len(self.tables) - 1

    def gather(self, row_ids: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """The first `width` entries of `row_ids` [R] int64 on the device: [R, W], or in `out`."""
        return torch.index_select(self.tables[:, :width], 0, row_ids, out=out)


class ResidentTables:
    """The tables of all rows of an executor, in device memory."""

    def __init__(self, max_num_blocks: int, device: torch.device, uploads: Uploads) -> None:
        """`max_num_blocks`: M. `uploads`: to `device`. Takes no memory before there are rows."""
        self._uploads = uploads
        self._memory = torch.zeros(1, max_num_blocks, dtype=torch.int32, device=device)
        self._tables: BlockTables | None = None
        self._version = NOTHING_SEEN

    def follow(self, tables: BlockTables) -> Tensor:
        """Asks for what is new in `tables`; returns the memory, [N + 1, M] int32.

        Who raises here, or later in the step, loses nothing: what is not known to have been asked
        for is asked for again. What a row has beyond its table means nothing.
        """
        if tables is not self._tables:
            self._make_room(tables.num_rows)
            self._tables, self._version = tables, NOTHING_SEEN
        changes = tables.changes_since(self._version)
        width = self._memory.shape[1]
        # What lies beyond the last token of the longest sequence is never read.
        is_read = changes.indexes < width
        if np.count_nonzero(is_read):
            places = (changes.row_ids * width + changes.indexes)[is_read]
            (where,), (block_ids,) = self._uploads.send(
                Numbers([places], [changes.block_ids[is_read]])
            )
            self._memory.view(-1).index_copy_(0, where, block_ids)
        self._version = changes.version
        return self._memory

    def _make_room(self, num_rows: int) -> None:
        if len(self._memory) != num_rows + 1:
            # The last one stays as it is.
            self._memory = self._memory.new_zeros(num_rows + 1, self._memory.shape[1])
