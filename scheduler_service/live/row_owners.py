"""Whose the rows of a core are: looked up for those alone that have changed hands."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.request import Int64Array, Request
from scheduler_service.core.row_columns import NO_STAY, RowColumns


class RowOwners:
    """`rows`: those of the core.

    `now`: of each row the number of the request that has it, or had it last, and the length of its
    prompt, [2, rows]; nobody writes to such an array, another takes its place.
    """

    def __init__(self, rows: RowColumns) -> None:
        self.rows = rows
        self.now: Int64Array = np.zeros((2, rows.max_num_rows), np.int64)
        self._stay_ids: Int64Array = np.full(rows.max_num_rows, NO_STAY, np.int64)

    def refresh(self) -> list[Request]:
        """Takes note of rows that others have by now; returns whose these are."""
        rows = self.rows
        changed = (rows.stay_ids != self._stay_ids).nonzero()[0]
        if len(changed) == 0:
            return []
        self._stay_ids[changed] = rows.stay_ids[changed]
        now, found = self.now.copy(), list[Request]()
        for row_id in changed.tolist():
            sequence = rows.sequences[row_id]
            if sequence is not None:
                now[0, row_id] = sequence.request.arrival
                now[1, row_id] = sequence.num_prompt_tokens
                found.append(sequence.request)
        self.now = now
        return found
