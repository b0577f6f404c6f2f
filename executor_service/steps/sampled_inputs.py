"""What rows sampled in the latest steps, which is the input of later ones.

Shape letters: N row ids, D steps that may be unfinished, R rows of a step.
"""

from __future__ import annotations

import numpy as np

from executor_service.steps.step import BoolArray, Int32Array, Int64Array
from executor_service.steps.token_runs import TokenRuns

_NO_TOKEN = -1
# Stands for a token that is not known yet.
_ANY_TOKEN = 0
_NO_STEP = np.iinfo(np.int64).min


class SampledInputs:
    """The last token of each row in each of the last steps, and where it is in the sequence.

    A step is expected when it begins, and recorded when it is finished.
    """

    def __init__(self, max_num_rows: int, max_inflight_steps: int) -> None:
        """`max_inflight_steps`: D."""
        # What was sampled in step k is in line k % 2D, with k beside it. The source of a step is
        # less than D before it; what begins before it is finished is less than D behind.
        shape = (2 * max_inflight_steps, max_num_rows)
        self._tokens = np.full(shape, _NO_TOKEN, np.int32)
        self._steps = np.full(shape, _NO_STEP, np.int64)
        self._first_positions = np.zeros(shape, np.int32)
        self._last_positions = np.zeros(shape, np.int32)
        self._knows_runs = False

    # -- what is asked ---------------------------------------------------------------------------

    def tokens(self, row_ids: Int32Array, step_id: int, steps_back: Int32Array) -> Int32Array:
        """The token row i sampled `steps_back[i]` steps before `step_id`, -1 if none then; [R].

        Of each row, the tokens of its last D steps at least are known. What it samples in a step
        that is not recorded yet is some token.
        """
        first = int(steps_back[0])
        if np.count_nonzero(steps_back == first) == len(steps_back):
            wanted: Int64Array | int = step_id - first
            line = wanted % len(self._steps)
            tokens = self._tokens[line].take(row_ids)
            found_steps = self._steps[line].take(row_ids)
        else:
            wanted = step_id - steps_back.astype(np.int64)
            lines = wanted % len(self._steps)
            tokens = self._tokens[lines, row_ids]
            found_steps = self._steps[lines, row_ids]
        tokens[found_steps != wanted] = _NO_TOKEN
        return tokens

    def positions(
        self, row_ids: Int32Array, step_id: int, steps_back: Int32Array, most: Int32Array
    ) -> Int32Array:
        """Where the input of row i begins: at that token, if `steps_back[i]` is not 0; [R].

        `most`: the position itself for rows with literal input, for others the largest that it can
        be. Of a step that is not recorded yet, rows get all that was expected.
        """
        if not self._knows_runs or not np.count_nonzero(steps_back):
            return most
        wanted = step_id - steps_back.astype(np.int64)
        lines = wanted % len(self._steps)
        is_sampled = (steps_back > 0) & (self._steps[lines, row_ids] == wanted)
        positions = np.minimum(self._last_positions[lines, row_ids], most)
        return np.where(is_sampled, positions, most).astype(np.int32)

    def tokens_recorded(self, row_ids: Int32Array, step_ids: Int64Array) -> Int32Array:
        """What was recorded for row i in step `step_ids[i]`, even if the row is gone since; [R].

        All of these steps were recorded, fewer than 2D steps before the latest expected.
        """
        tokens: Int32Array = self._tokens[step_ids % len(self._tokens), row_ids]
        return tokens

    def positions_recorded(self, row_ids: Int32Array, step_ids: Int64Array) -> Int32Array:
        """Where the tokens are that `tokens_recorded` says; [R]."""
        positions: Int32Array = self._last_positions[step_ids % len(self._tokens), row_ids]
        return positions

    # -- what changes ----------------------------------------------------------------------------

    def expect(
        self,
        row_ids: Int32Array,
        step_id: int,
        positions: Int32Array,
        num_more: Int32Array | None = None,
    ) -> None:
        """The rows sample in `step_id`, which is yet to be recorded.

        `positions`: [R], where the first token of each will be. `num_more`: [R], how many more it
        gets, unless it ends before; None for none.
        """
        line = step_id % len(self._steps)
        # Assigning through 32-bit indexes is several times slower.
        indexes = row_ids.astype(np.intp)
        self._steps[line][indexes] = step_id
        self._tokens[line][indexes] = _ANY_TOKEN
        self._first_positions[line][indexes] = positions
        self._last_positions[line][indexes] = positions
        if num_more is not None:
            self._knows_runs = True
            self._last_positions[line][indexes] += num_more

    def record(
        self, row_ids: Int32Array, step_id: int, token_ids: Int32Array, runs: TokenRuns | None
    ) -> BoolArray:
        """The rows sampled `token_ids` [R] in `step_id`, -1 for nothing, as the last of `runs`.

        Returns [R], which rows are still those that were expected.
        """
        line = step_id % len(self._steps)
        indexes = row_ids.astype(np.intp)
        self._tokens[line][indexes] = token_ids
        if runs is not None:
            self._knows_runs = True
            first = self._first_positions[line].take(row_ids)
            self._last_positions[line][indexes] = first + np.maximum(runs.counts - 1, 0)
        is_known: BoolArray = self._steps[line].take(row_ids) == step_id
        return is_known

    def forget_tokens(self, row_ids: Int32Array, step_id: int) -> None:
        """What the rows sampled in `step_id` is no input."""
        self._tokens[step_id % len(self._steps), row_ids] = _NO_TOKEN

    def forget_rows(self, row_ids: Int32Array) -> None:
        """The rows are gone."""
        self._steps[:, row_ids] = _NO_STEP
