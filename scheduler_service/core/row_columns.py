"""The hot state of running sequences as columns, so that a step costs what changed."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from scheduler_service.core.request import NO_ROW, Sequence, SequenceStatus

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_arrival = attrgetter("request.arrival")


@dataclass(frozen=True, slots=True)
class RowWork:
    """What the rows of a step compute; see `Work` in the proto. Row i is `sequences[i]`.

    A sequence is replaced by None when the result of the step has become meaningless for it.
    `row_ids`, `num_computed_tokens`, `num_new_tokens`, `sampled_steps_back`: [R] int32. `samples`:
    [R] bool. `token_ids`: the literal input tokens, concatenated.
    """

    sequences: list[Sequence | None]
    row_ids: Int32Array
    num_computed_tokens: Int32Array
    num_new_tokens: Int32Array
    sampled_steps_back: Int32Array
    token_ids: list[int]
    samples: BoolArray


class RowColumns:
    """One row for each running sequence; columns are indexed by row id.

    `num_tokens`: tokens known or promised. `num_computed`: tokens whose KV is written, or will be
    by a step in flight. `num_slots`: tokens the block table holds. `stop_len`: tokens at which the
    sequence ends. `sampled_in_step`: the step that samples the last token, 0 if the executor did
    not sample it. `last_step_id`: the latest step that has the row.
    """

    def __init__(self, max_num_rows: int) -> None:
        self.max_num_rows = max_num_rows
        self.sequences: list[Sequence | None] = [None] * max_num_rows
        self.num_tokens = np.zeros(max_num_rows, np.int32)
        self.num_computed = np.zeros(max_num_rows, np.int32)
        self.num_slots = np.zeros(max_num_rows, np.int32)
        self.stop_len = np.zeros(max_num_rows, np.int32)
        self.sampled_in_step = np.zeros(max_num_rows, np.int64)
        self.last_step_id = np.zeros(max_num_rows, np.int64)
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        self._by_arrival: list[Sequence] = []
        self._order: Int32Array | None = None

    def __len__(self) -> int:
        return len(self._by_arrival)

    @property
    def is_full(self) -> bool:
        """Whether no row is left."""
        return not self._free_rows

    @property
    def by_arrival(self) -> list[Sequence]:
        """The running sequences, oldest first. Not to be changed by the caller."""
        return self._by_arrival

    @property
    def order(self) -> Int32Array:
        """Row ids, oldest sequence first."""
        if self._order is None:
            self._order = np.array([s.row_id for s in self._by_arrival], np.int32)
        return self._order

    def add(self, sequence: Sequence, num_slots: int) -> None:
        """Gives `sequence` a row; mutates its `row_id` and `status`."""
        row_id = self._free_rows.pop()
        self.sequences[row_id] = sequence
        self.num_tokens[row_id] = len(sequence.token_ids)
        self.num_computed[row_id] = 0
        self.num_slots[row_id] = num_slots
        self.stop_len[row_id] = sequence.request.stop_len
        self.sampled_in_step[row_id] = 0
        self.last_step_id[row_id] = 0
        insort(self._by_arrival, sequence, key=_arrival)
        self._order = None
        sequence.row_id = row_id
        sequence.status = SequenceStatus.RUNNING

    def remove(self, sequence: Sequence) -> int:
        """Takes the row back and returns its id; moves what is in flight to the sequence."""
        row_id = sequence.row_id
        sequence.num_promised = int(self.num_tokens[row_id]) - len(sequence.token_ids)
        sequence.last_step_id = int(self.last_step_id[row_id])
        sequence.row_id = NO_ROW
        self.sequences[row_id] = None
        self._free_rows.append(row_id)
        self._by_arrival.remove(sequence)
        self._order = None
        return row_id

    def pending_tokens(self, row_ids: Int32Array) -> Int32Array:
        """How many tokens each row still has to compute; 0 where it must not run now.

        That is where it ends with the tokens promised, or waits for a block.
        """
        num_computed = self.num_computed[row_ids]
        num_tokens = self.num_tokens[row_ids]
        may_run = (num_tokens < self.stop_len[row_ids]) & (num_computed < self.num_slots[row_ids])
        return np.where(may_run, num_tokens - num_computed, 0).astype(np.int32)

    def full_rows(self) -> list[int]:
        """Rows that need a block before they can go on, oldest first."""
        order = self.order
        full = self.num_computed[order] >= self.num_slots[order]
        full &= self.num_tokens[order] < self.stop_len[order]
        rows: list[int] = order[full].tolist()
        return rows

    def forget_samples(self) -> None:
        """The executor no longer has the tokens it sampled: inputs are literal again."""
        self.sampled_in_step[:] = 0

    def plan_work(self, row_ids: Int32Array, num_new_tokens: Int32Array, step_id: int) -> RowWork:
        """The rows compute `num_new_tokens` each in step `step_id`. Mutates the columns."""
        num_computed = self.num_computed[row_ids]
        sampled_in = self.sampled_in_step[row_ids]
        steps_back = np.where(sampled_in > 0, step_id - sampled_in, 0).astype(np.int32)
        samples = num_computed + num_new_tokens == self.num_tokens[row_ids]
        sequences = [self.sequences[row_id] for row_id in row_ids.tolist()]
        token_ids: list[int] = []
        for index in np.flatnonzero(steps_back == 0).tolist():
            sequence, start = sequences[index], int(num_computed[index])
            assert sequence is not None
            token_ids += sequence.token_ids[start : start + int(num_new_tokens[index])]

        self.num_computed[row_ids] += num_new_tokens
        self.last_step_id[row_ids] = step_id
        sampling_rows = row_ids[samples]
        self.num_tokens[sampling_rows] += 1
        self.sampled_in_step[sampling_rows] = step_id
        return RowWork(
            sequences, row_ids, num_computed, num_new_tokens, steps_back, token_ids, samples
        )
