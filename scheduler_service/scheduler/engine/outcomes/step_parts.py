"""Parts of a result: tokens of the oldest step in flight that are known before its result.

Shape letters: R rows of the step, M most tokens of any of its rows.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.scheduler.values import (
    ROW_COMPUTED,
    ContractBroken,
    Int32Array,
    StepOutcome,
    StepPart,
    StepPlan,
)

_NO_ROWS = np.empty(0, np.int32)


class StepParts:
    """Tokens that parts have brought of the oldest step in flight; all empty before its first part.

    `told`: [R] int32, tokens of each row. `taken`: [R] int32, how many of them are in the sequence
    of the row already; the others wait for the result. `num_left`: most tokens that any row may
    still get; None before the first part.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the parts of a step that was answered."""
        self._step_id = 0
        self.told: Int32Array = _NO_ROWS
        self.taken: Int32Array = _NO_ROWS
        # [R, M] int32: row i begins with `told[i]` tokens.
        self._token_ids: Int32Array = _NO_ROWS
        self.num_left: int | None = None

    def __bool__(self) -> bool:
        return self._step_id > 0

    def add(self, plan: StepPlan, part: StepPart) -> None:
        """Adds the tokens of `part`, of the step `plan`, to `told`. Raises ContractBroken.

        Checks how many tokens each row has, but not the tokens.
        """
        num_more, num_rows = plan.work.num_more_tokens, len(plan.work.row_ids)
        if num_more is None or not plan.work.reports_parts:
            raise ContractBroken(f"a part of step {part.step_id}, which has no parts")
        if len(part.counts) != num_rows or int(part.counts.sum()) != len(part.token_ids):
            raise ContractBroken(
                f"columns of a part of step {part.step_id}: sampled_offsets has "
                f"{int(part.counts.sum())} tokens of {len(part.counts)} rows; "
                f"received: {len(part.token_ids)} of {num_rows}"
            )
        if not self:
            self._step_id = part.step_id
            self.told = np.zeros(num_rows, np.int32)
            self.taken = self.told.copy()
            self._token_ids = np.zeros((num_rows, plan.work.most_tokens), np.int32)
        told = self.told + part.counts
        if np.count_nonzero(told > num_more + 1):
            index = int(np.argmax(told - num_more))
            raise ContractBroken(
                f"row {index} has {told[index]} tokens in parts of step {part.step_id}; "
                f"allowed: at most {num_more[index] + 1}"
            )
        self._token_ids[self._columns(self.told, told)] = part.token_ids
        self.told = told
        self.num_left = int((num_more + 1 - told).max(initial=0))

    def take(self, counts: Int32Array) -> None:
        """Notes that `counts` [R] further tokens are in the sequences of their rows."""
        self.taken = self.taken + counts

    def find_contradictions(self, outcome: StepOutcome) -> dict[int, str]:
        """Returns by index the rows whose tokens in the result do not begin with those of parts.

        Considers rows that were computed. `outcome`: with `token_counts`.
        """
        counts = outcome.counts
        is_wrong = counts < self.told
        starts = np.cumsum(counts) - counts
        told = np.where(is_wrong, 0, self.told)
        rows, columns = self._columns(np.zeros_like(told), told).nonzero()
        is_other = outcome.token_ids[starts[rows] + columns] != self._token_ids[rows, columns]
        is_wrong[rows[is_other]] = True
        if outcome.row_statuses is not None:
            is_wrong &= [status in ROW_COMPUTED for status in outcome.row_statuses]
        problem = "the result does not begin with the tokens of its parts"
        return dict.fromkeys(np.flatnonzero(is_wrong).tolist(), problem)

    def _columns(self, starts: Int32Array, ends: Int32Array) -> np.ndarray:
        """Returns [R, M] bool: the columns from `starts` [R] to before `ends` [R] of each row."""
        columns = np.arange(self._token_ids.shape[1])
        is_in: np.ndarray = (columns >= starts[:, None]) & (columns < ends[:, None])
        return is_in
