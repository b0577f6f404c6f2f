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
from executor_service.steps.step import Int32Array, Int64Array, StepInput


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


# -- Sampled tokens that stay on the device, for steps that begin before the host has them ---------
#
# What is written and read here is asked of the compute stream, so it is done in the order of the
# steps, and nobody waits. Which token is whose the host knows: only tokens are on the device.
#
# Shape letters: S rows that sample, A rows whose input token is awaited.


@dataclass(frozen=True, slots=True)
class _Kept:
    """`tokens`: [S] int64 on the device, or one if no row samples. `places`: whose, by row id."""

    tokens: Tensor
    places: Int64Array


class SampledTokens:
    """A token for each row id of each step that is kept."""

    def __init__(self) -> None:
        self._of_steps: dict[int, _Kept] = {}

    def keep(self, step: StepInput, rows: Int64Array, token_ids: Tensor) -> None:
        """`token_ids` [S] int32 are what `rows` [S] of `step` sample, -1 for none.

        They are copied: what steps draw in a recording lies where the next one draws. Whatever has
        none gets some token of the vocabulary.
        """
        places = np.zeros(int(step.row_ids.max()) + 1, np.int64)
        places[step.row_ids[rows]] = np.arange(len(rows))
        tokens = token_ids.clamp(min=0) if len(rows) else token_ids.new_zeros(1)
        self._of_steps[step.step_id] = _Kept(tokens.to(torch.int64), places)

    def forget(self, step_id: int) -> None:
        """Gives its memory back, if it was kept."""
        self._of_steps.pop(step_id, None)

    def find(self, step_ids: Int64Array, row_ids: Int32Array) -> tuple[Tensor, Int64Array]:
        """What each of `row_ids` [A] sampled in the step beside it [A].

        Returns tokens, int64 on the device, and which of these it is: [A] int64. All of these
        steps are kept.
        """
        distinct, which = np.unique(step_ids, return_inverse=True)
        kept = [self._of_steps[step_id] for step_id in distinct.tolist()]
        if len(kept) == 1:
            return kept[0].tokens, kept[0].places[row_ids]
        starts = np.cumsum([0, *(len(each.tokens) for each in kept[:-1])])
        places = np.empty(len(row_ids), np.int64)
        for index, each in enumerate(kept):
            is_here = which == index
            places[is_here] = each.places[row_ids[is_here]] + starts[index]
        return torch.cat([each.tokens for each in kept]), places
