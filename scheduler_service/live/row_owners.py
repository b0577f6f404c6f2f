"""Owners of the rows of an executor, kept up to date at the cost of what changes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler_service.core.plan import NewRow
from scheduler_service.core.request import Int64Array, Request, Sequence
from scheduler_service.core.row_columns import NO_STAY, RowColumns


class RowOwners:
    """Requests that have, or had last, the rows of `rows`, which are those of an engine.

    `now`: [2, rows], of each row the number of its request and the length of the prompt. Nobody
    writes to such an array: another takes its place.
    """

    def __init__(self, rows: RowColumns) -> None:
        self.rows = rows
        self.now: Int64Array = np.zeros((2, rows.max_num_rows), np.int64)
        self._stay_ids: Int64Array = np.full(rows.max_num_rows, NO_STAY, np.int64)

    def take(self, new_rows: Iterable[NewRow]) -> None:
        """Takes note of the rows that are new in a plan: no others have changed hands by it."""
        self._set((row.row_id, row.sequence) for row in new_rows)

    def refresh(self) -> list[Request]:
        """Takes note of the rows as they are now; returns the requests of those that changed."""
        rows = self.rows
        changed = (rows.stay_ids != self._stay_ids).nonzero()[0]
        if len(changed) == 0:
            return []
        self._stay_ids[changed] = rows.stay_ids[changed]
        found: list[tuple[int, Sequence]] = []
        for row_id in changed.tolist():
            sequence = rows.sequences[row_id]
            if sequence is not None:
                found.append((row_id, sequence))
        self._set(found)
        return [sequence.request for _, sequence in found]

    def _set(self, owners: Iterable[tuple[int, Sequence]]) -> None:
        now = self.now.copy()
        for row_id, sequence in owners:
            now[:, row_id] = sequence.request.arrival, sequence.num_prompt_tokens
        self.now = now
