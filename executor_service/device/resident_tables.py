"""Block tables and sampled tokens that stay on the device between steps.

A step sends only the changed table entries and its row ids. Reads and writes are queued on the
compute stream, so steps queued before still see the old contents.

Shape letters: N row ids, M blocks of the longest table that a sequence can have, R rows of a pass,
W blocks of the longest table that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device.uploads import IntegerArrays, Uploads
from executor_service.steps import NOTHING_SEEN, BlockTables, Int32Array, Int64Array, StepInput


@dataclass(frozen=True, slots=True)
class ResidentRows:
    """Tables on the device for the rows of a pass.

    `tables`: [N + 1, M] int32, on the device. `row_ids`: [R], the line of each row.
    """

    tables: Tensor
    row_ids: Int64Array

    @property
    def empty_row_id(self) -> int:
        """Row id N, whose table has block 0 throughout; for padding rows."""
        return len(self.tables) - 1

    def gather(self, row_ids: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Gathers table entries on the device, [R, W], in `out` if given.

        Takes the first `width` entries of the tables of `row_ids` [R] int64, on the device.
        """
        return torch.index_select(self.tables[:, :width], 0, row_ids, out=out)


class ResidentTables:
    """Block tables of all rows of an executor, in device memory."""

    def __init__(self, max_num_blocks: int, device: torch.device, uploads: Uploads) -> None:
        """`max_num_blocks`: M. `uploads`: to `device`. Takes no memory before there are rows."""
        self._uploads = uploads
        self._memory = torch.zeros(1, max_num_blocks, dtype=torch.int32, device=device)
        self._tables: BlockTables | None = None
        self._version = NOTHING_SEEN

    def follow(self, tables: BlockTables) -> Tensor:
        """Queues the upload of changes in `tables`; returns the memory, [N + 1, M] int32.

        An error here, or later in the step, loses nothing: changes that were not surely queued are
        sent again. Entries behind the end of a row's table have no meaning.
        """
        if tables is not self._tables:
            self._make_room(tables.num_rows)
            self._tables, self._version = tables, NOTHING_SEEN
        changes = tables.changes_since(self._version)
        width = self._memory.shape[1]
        # Entries beyond the last token of the longest sequence are never read.
        is_read = changes.indexes < width
        if np.count_nonzero(is_read):
            entries = (changes.row_ids * width + changes.indexes)[is_read]
            (where,), (block_ids,) = self._uploads.send(
                IntegerArrays([entries], [changes.block_ids[is_read]])
            )
            self._memory.view(-1).index_copy_(0, where, block_ids)
        self._version = changes.version
        return self._memory

    def _make_room(self, num_rows: int) -> None:
        if len(self._memory) != num_rows + 1:
            # The table of the last row, which is empty_row_id, is never written.
            self._memory = self._memory.new_zeros(num_rows + 1, self._memory.shape[1])


# -- Sampled tokens on the device, for steps that begin before the host has them -------------------
#
# Reads and writes are queued on the compute stream, so they happen in the order of the steps, and
# the host does not wait. The host knows which token belongs to which row; the device has tokens
# only.
#
# Shape letters: S rows that sample, A rows whose input token is awaited.


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tokens of one step.

    `tokens`: [S] int64 on the device, or one token if no row samples. `token_indexes`: index in
    `tokens` by row id.
    """

    tokens: Tensor
    token_indexes: Int64Array


class SampledTokens:
    """Sampled token of each row id, for each step that is kept."""

    def __init__(self) -> None:
        self._of_steps: dict[int, _Kept] = {}

    def keep(self, step: StepInput, rows: Int64Array, token_ids: Tensor) -> None:
        """Keeps `token_ids` [S] int32, which `rows` [S] of `step` sample, -1 for none.

        The tokens are copied, because a recorded step draws into memory that the next step
        overwrites. A row without a token gets an arbitrary token of the vocabulary.
        """
        token_indexes = np.zeros(int(step.row_ids.max()) + 1, np.int64)
        token_indexes[step.row_ids[rows]] = np.arange(len(rows))
        tokens = token_ids.clamp(min=0) if len(rows) else token_ids.new_zeros(1)
        self._of_steps[step.step_id] = _Kept(tokens.to(torch.int64), token_indexes)

    def forget(self, step_id: int) -> None:
        """Frees the tokens of a step, if the step was kept."""
        self._of_steps.pop(step_id, None)

    def find(self, step_ids: Int64Array, row_ids: Int32Array) -> tuple[Tensor, Int64Array]:
        """Finds the token that each of `row_ids` [A] sampled in the step `step_ids[i]`; [A].

        Returns int64 tokens on the device, and the index of each row's token in them, [A] int64.
        All these steps must be kept.
        """
        distinct, which = np.unique(step_ids, return_inverse=True)
        kept = [self._of_steps[step_id] for step_id in distinct.tolist()]
        if len(kept) == 1:
            return kept[0].tokens, kept[0].token_indexes[row_ids]
        starts = np.cumsum([0, *(len(each.tokens) for each in kept[:-1])])
        token_indexes = np.empty(len(row_ids), np.int64)
        for index, each in enumerate(kept):
            is_here = which == index
            token_indexes[is_here] = each.token_indexes[row_ids[is_here]] + starts[index]
        return torch.cat([each.tokens for each in kept]), token_indexes
