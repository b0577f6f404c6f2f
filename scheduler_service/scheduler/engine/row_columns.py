"""The hot state of running sequences as columns, so that a step costs what changed."""

from __future__ import annotations

import mmap
from bisect import bisect_left

import numpy as np

from scheduler_service.scheduler.values.plan import Drafts, RowWork, TableWrites
from scheduler_service.scheduler.values.request import (
    NO_ROW,
    BoolArray,
    Int32Array,
    Int64Array,
    Request,
    Sequence,
    SequenceStatus,
)

NO_STAY = 0
# Between steps that do nothing but ask rows again whose grammar is being compiled.
_MIN_PAUSE_NS = 2_000_000
_MAX_PAUSE_NS = 50_000_000
RELEASED = -1


_NO_TOKENS = np.empty(0, np.int32)
# In steps of decodes numbers are arrays without dimensions: to convert a Python integer costs numpy
# more (0.3 us) than to add it to 64 elements. For the same reason tables are indexed with int64.
ZERO: Int32Array = np.array(0, np.int32)
ONE: Int32Array = np.array(1, np.int32)
_NO_WRITES = TableWrites(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS)


def _sparse_table(num_rows: int, width: int) -> Int32Array:
    """Zeros, large and mostly untouched: memory is taken in small pages, for what is written.

    `numpy.zeros` asks for huge pages, of which a row that is hardly used would take a whole one.
    """
    pages = mmap.mmap(-1, num_rows * width * np.dtype(np.int32).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.int32).reshape(num_rows, width)


class RowColumns:
    """One row for each running sequence; columns are indexed by row id.

    `token_ids`: [N, T] int32, the tokens known. `num_known`: how many. `num_tokens`: known or
    promised by a step in flight. `num_computed`: tokens whose KV is written, or will be by a step
    in flight. `num_unsure`: by how much both of these may turn out to be less, because steps in
    flight may bring fewer tokens than they are allowed to. `block_tables`: [N, W] int32.
    `num_slots`: tokens the block table reaches, and `num_told_slots` as far as the executor was
    told of it. `num_released`: leading blocks given back, behind the sliding window. `stop_len`:
    tokens at which the sequence ends. `run_limit`: the row may run while `num_computed` is less: it
    has a slot, and does not end with the tokens promised. `promises`: 1 if a sampled token is part
    of the sequence at once, 0 if something else chooses it, or if it may not come. `may_repeat`: 1
    if the last token may have to be computed
    again, because the row has a grammar and no token yet in this stay; else 0.
    `is_held_back`: it is not planned before all its tokens are known;
    `has_held_back`: there may be such rows.
    `unsampled_since_ns`: since when that is so, 0 if it never was; `ask_alone_at_ns`: when a step
    of such rows alone is next, 0 for at once. `sampled_in_step`: the step that samples the last
    token, 0 if the executor did not. `last_step_id`: the latest step that has the row. `stay_ids`:
    a number that no other stay of a sequence in a row has, 0 for a free row. `client_keys`,
    `is_plain`: the owner's name for the request, and whether a token and that name are all the
    owner needs.
    """

    def __init__(self, max_num_rows: int, max_len: int, block_size: int, max_blocks: int) -> None:
        self.max_num_rows = max_num_rows
        self.block_size = block_size
        self._block_size: Int32Array = np.array(block_size, np.int32)
        self.sequences: list[Sequence | None] = [None] * max_num_rows
        self.token_ids = _sparse_table(max_num_rows, max_len)
        self.block_tables = _sparse_table(max_num_rows, max_blocks)
        self.num_known = np.zeros(max_num_rows, np.int32)
        self.num_tokens = np.zeros(max_num_rows, np.int32)
        self.num_computed = np.zeros(max_num_rows, np.int32)
        self.num_unsure = np.zeros(max_num_rows, np.int32)
        self.num_slots = np.zeros(max_num_rows, np.int32)
        self.num_told_slots = np.zeros(max_num_rows, np.int32)
        self.num_released = np.zeros(max_num_rows, np.int32)
        self.stop_len = np.zeros(max_num_rows, np.int32)
        self.run_limit = np.zeros(max_num_rows, np.int32)
        self.promises = np.zeros(max_num_rows, np.int32)
        self.may_repeat = np.zeros(max_num_rows, np.int32)
        self.is_held_back = np.zeros(max_num_rows, np.bool_)
        self.has_held_back = False
        self.unsampled_since_ns = np.zeros(max_num_rows, np.int64)
        self.ask_alone_at_ns = np.zeros(max_num_rows, np.int64)
        self.sampled_in_step = np.zeros(max_num_rows, np.int64)
        self.last_step_id = np.zeros(max_num_rows, np.int64)
        self.stay_ids = np.zeros(max_num_rows, np.int64)
        self.client_keys = np.zeros(max_num_rows, np.int64)
        self._ones = np.ones(max_num_rows, np.int64)
        self.is_plain = np.zeros(max_num_rows, np.bool_)
        self.num_not_plain = 0
        self.num_without_promise = 0
        self.num_with_prompt_logprobs = 0
        self._last_stay_id = NO_STAY
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        # Parallel, most urgent first.
        self._keys: list[tuple[int, ...]] = []
        self._row_order: list[int] = []
        self._order: Int64Array | None = None
        self._key_of_row: list[tuple[int, ...]] = [()] * max_num_rows
        self._class_of_row: list[tuple[int, ...]] = [()] * max_num_rows

    def __len__(self) -> int:
        return len(self._row_order)

    @property
    def num_free(self) -> int:
        """Rows nobody has."""
        return len(self._free_rows)

    @property
    def order(self) -> Int64Array:
        """Row ids, most urgent first."""
        if self._order is None:
            self._order = np.array(self._row_order, np.int64)
        return self._order

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, most urgent first."""
        return [self.sequence(row_id) for row_id in self._row_order]

    def step_class(self, row_id: int) -> tuple[int, ...]:
        """Returns the step class of a row; rows of one class are neighbours in the order."""
        return self._class_of_row[row_id]

    @property
    def least_urgent(self) -> Sequence:
        """The last of the running sequences, of which there must be one."""
        return self.sequence(self._row_order[-1])

    def are_all_of(self, request: Request) -> bool:
        """Whether nobody else runs than `request`; its rows are neighbours in the order."""
        ends = (self._row_order[0], self._row_order[-1])
        return all(self.sequence(row_id).request is request for row_id in ends)

    def sequence(self, row_id: int) -> Sequence:
        """The sequence that has the row."""
        sequence = self.sequences[row_id]
        assert sequence is not None
        return sequence

    def add(
        self,
        sequence: Sequence,
        rank: tuple[int, ...],
        num_computed: int,
        step_class: tuple[int, ...] = (),
    ) -> int:
        """Gives `sequence` a row, whose table is still empty; mutates its `row_id` and `status`."""
        request, num_tokens = sequence.request, len(sequence.token_ids)
        row_id = self._free_rows.pop()
        self._last_stay_id += 1
        self.sequences[row_id] = sequence
        self.token_ids[row_id, :num_tokens] = sequence.token_ids
        self.num_known[row_id] = self.num_tokens[row_id] = num_tokens
        self.num_computed[row_id] = num_computed
        self.num_unsure[row_id] = 0
        self.num_slots[row_id] = self.num_told_slots[row_id] = self.num_released[row_id] = 0
        self.stop_len[row_id] = request.stop_len
        self.may_repeat[row_id] = may_repeat = request.params.grammar is not None
        self.promises[row_id] = promises = request.params.beam is None and not may_repeat
        self.num_without_promise += not promises
        self.is_held_back[row_id] = False
        self.unsampled_since_ns[row_id] = self.ask_alone_at_ns[row_id] = 0
        self.sampled_in_step[row_id] = self.last_step_id[row_id] = 0
        self.stay_ids[row_id] = self._last_stay_id
        self.client_keys[row_id] = request.client_key
        params = request.params
        self.is_plain[row_id] = is_plain = (
            params.num_logprobs is None and params.num_sequences == 1 and params.beam is None
        )
        self.num_not_plain += not is_plain
        self.num_with_prompt_logprobs += params.num_prompt_logprobs is not None
        key = (*rank, sequence.index)
        position = bisect_left(self._keys, key)
        self._keys.insert(position, key)
        self._row_order.insert(position, row_id)
        self._key_of_row[row_id] = key
        self._class_of_row[row_id] = step_class
        self._order = None
        sequence.row_id = row_id
        sequence.status = SequenceStatus.RUNNING
        return row_id

    def remove(self, sequence: Sequence) -> None:
        """Takes the row back; the sequence has its tokens again, and what is promised to it."""
        row_id = sequence.row_id
        position = bisect_left(self._keys, self._key_of_row[row_id])
        del self._keys[position], self._row_order[position]
        self._order = None
        sequence.token_ids = self.known_tokens(row_id).copy()
        sequence.num_promised = int(self.num_tokens[row_id] - self.num_known[row_id])
        sequence.row_id = NO_ROW
        self.num_not_plain -= not self.is_plain[row_id]
        self.num_without_promise -= not self.promises[row_id]
        self.may_repeat[row_id] = 0
        self.num_with_prompt_logprobs -= sequence.request.params.num_prompt_logprobs is not None
        self.num_told_slots[row_id] = self.num_slots[row_id]
        self.sequences[row_id] = None
        self.stay_ids[row_id] = NO_STAY
        self._free_rows.append(row_id)

    def known_tokens(self, row_id: int) -> Int32Array:
        """The tokens of a row, as a view."""
        return self.token_ids[row_id, : self.num_known[row_id]]

    def block_table(self, row_id: int) -> Int32Array:
        """The block table of a row, as a view; -1 where a block was released."""
        return self.block_tables[row_id, : self.num_slots[row_id] // self.block_size]

    def held_blocks(self, row_id: int) -> list[int]:
        """The blocks a row refers to."""
        blocks: list[int] = self.block_table(row_id)[self.num_released[row_id] :].tolist()
        return blocks

    def extend_table(self, row_id: int, block_ids: list[int]) -> None:
        """Appends blocks to the table of a row."""
        start = self.num_slots[row_id] // self.block_size
        self.block_tables[row_id, start : start + len(block_ids)] = block_ids
        self.num_slots[row_id] += len(block_ids) * self.block_size
        self.run_limit[row_id] = min(self.num_slots[row_id], self.stop_len[row_id] - 1)

    def extend_each(
        self, row_ids: Int64Array, block_ids: list[int], counts: Int32Array | None = None
    ) -> None:
        """Appends the next `counts[i]` blocks to the table of each row; None for one each."""
        num_slots = self.num_slots[row_ids]
        starts = (num_slots // self._block_size).astype(np.int64)
        if counts is None:
            self.block_tables[row_ids, starts] = block_ids
            num_slots += self._block_size
        else:
            self.block_tables[_ragged(row_ids, starts, counts)] = block_ids
            num_slots += counts * self._block_size
        self.num_slots[row_ids] = num_slots
        self.run_limit[row_ids] = np.minimum(num_slots, self.stop_len[row_ids] - ONE)

    def shrink_table(self, row_id: int, count: int) -> list[int]:
        """Takes the last `count` blocks from the table of a row."""
        blocks: list[int] = self.block_table(row_id)[-count:].tolist()
        self.num_slots[row_id] -= count * self.block_size
        self.num_told_slots[row_id] = min(self.num_told_slots[row_id], self.num_slots[row_id])
        self.run_limit[row_id] = min(self.num_slots[row_id], self.stop_len[row_id] - 1)
        return blocks

    def release_blocks(self, row_ids: Int64Array, ends: Int32Array) -> Int32Array:
        """Takes the blocks before `ends` from tables, those of one row after those of another."""
        starts = self.num_released[row_ids]
        index = _ragged(row_ids, starts.astype(np.int64), ends - starts)
        blocks: Int32Array = self.block_tables[index]
        self.block_tables[index] = RELEASED
        self.num_released[row_ids] = ends
        return blocks

    def take_table_writes(self, new_row_ids: list[int]) -> TableWrites:
        """What tables have grown by; the executor is told now. Of new rows it gets all of it."""
        if new_row_ids:
            self.num_told_slots[new_row_ids] = self.num_slots[new_row_ids]
        (row_ids,) = (self.num_told_slots != self.num_slots).nonzero()
        if len(row_ids) == 0:
            return _NO_WRITES
        num_slots, num_told_slots = self.num_slots[row_ids], self.num_told_slots[row_ids]
        self.num_told_slots[row_ids] = num_slots
        starts = num_told_slots // self._block_size
        counts = (num_slots - num_told_slots) // self._block_size
        is_one_each = np.count_nonzero(counts == ONE) == len(counts)
        first = row_ids, starts.astype(np.int64)
        index = first if is_one_each else _ragged(*first, counts)
        return TableWrites(row_ids.astype(np.int32), starts, counts, self.block_tables[index])

    def append_token(self, row_id: int, token_id: int) -> None:
        """A token that no step promised becomes the last of the row."""
        self.token_ids[row_id, self.num_known[row_id]] = token_id
        self.num_known[row_id] += 1
        self.num_tokens[row_id] += 1

    def repeat_last(self, row_id: int, now_ns: int) -> int:
        """The last token of a row that `may_repeat` is to be computed once more.

        Returns for how long that has been so. It is asked alone when half of that has passed again.
        """
        self.num_computed[row_id] -= 1
        if self.unsampled_since_ns[row_id] == 0:
            self.unsampled_since_ns[row_id] = now_ns
        waited_ns = now_ns - int(self.unsampled_since_ns[row_id])
        pause_ns = min(max(waited_ns // 2, _MIN_PAUSE_NS), _MAX_PAUSE_NS)
        self.ask_alone_at_ns[row_id] = now_ns + pause_ns
        return waited_ns

    def ask_at_ns(self, row_ids: Int64Array) -> int:
        """When a step of these rows alone is worth its while; 0 for at once."""
        return int(self.ask_alone_at_ns[row_ids].min()) if self.num_without_promise else 0

    def keep_promises(self, row_ids: Int64Array) -> None:
        """These rows have a token: those that `may_repeat` promise theirs from now on."""
        first = row_ids[self.may_repeat[row_ids] > ZERO]
        self.num_tokens[first] += ONE
        self.promises[first] = 1
        self.may_repeat[first] = self.ask_alone_at_ns[first] = 0
        self.num_without_promise -= len(first)

    def forget_samples(self) -> None:
        """The executor no longer has the tokens it sampled: inputs are literal again."""
        self.sampled_in_step[:] = 0

    def plan_work(
        self,
        row_ids: Int64Array,
        num_new_tokens: Int32Array,
        step_id: int,
        num_run_on: Int32Array | None = None,
        drafts: Drafts | None = None,
    ) -> RowWork:
        """The rows compute `num_new_tokens` each in step `step_id`. Mutates the columns.

        `num_run_on`: how many tokens each may get by running on; None for none. `drafts`: None for
        none. With either, all rows sample and promise what they sample.
        """
        num_computed = self.num_computed[row_ids]
        end = num_computed + num_new_tokens
        # All elements written: numpy assigns a single value to many indexes slowly.
        step = self._ones[: len(row_ids)] * np.array(step_id)
        sampled_in = self.sampled_in_step[row_ids]
        if np.count_nonzero(sampled_in) == len(row_ids):
            steps_back, token_ids = (step - sampled_in).astype(np.int32), _NO_TOKENS
        else:
            is_sampled = sampled_in > 0
            steps_back = np.where(is_sampled, step - sampled_in, 0).astype(np.int32)
            token_ids = self._literal_tokens(row_ids, num_computed, end, ~is_sampled)
        self.num_computed[row_ids] = end
        self.last_step_id[row_ids] = step
        num_tokens = self.num_tokens[row_ids]
        is_last = end == num_tokens
        samples: BoolArray | None = None
        sampling_rows = row_ids
        if np.count_nonzero(is_last) < len(row_ids):
            samples = is_last
            sampling_rows, num_tokens = row_ids[is_last], num_tokens[is_last]
            step = step[: len(sampling_rows)]
        promises = self.promises[sampling_rows] if self.num_without_promise else ONE
        self.num_tokens[sampling_rows] = num_tokens + promises
        self.sampled_in_step[sampling_rows] = step * promises
        work = RowWork(
            row_ids,
            self.stay_ids[row_ids],
            num_computed,
            num_new_tokens,
            steps_back,
            token_ids,
            samples,
            num_run_on,
            drafts,
        )
        if (num_more := work.num_more_tokens) is not None:
            assert samples is None, "a row may get several tokens that does not sample"
            for column in (self.num_computed, self.num_tokens, self.num_unsure):
                column[row_ids] += num_more
        return work

    def settle(self, row_ids: Int64Array, num_more: Int32Array, missing: Int32Array) -> None:
        """A step was answered that allowed `num_more` tokens more than one: `missing` of them."""
        self.num_unsure[row_ids] -= num_more
        self.num_computed[row_ids] -= missing
        self.num_tokens[row_ids] -= missing

    def append_tokens(self, row_ids: Int64Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """`counts[i]` of `token_ids` become the last ones of row i, which were promised."""
        num_known = self.num_known[row_ids]
        self.token_ids[_ragged(row_ids, num_known.astype(np.int64), counts)] = token_ids
        self.num_known[row_ids] = num_known + counts

    def _literal_tokens(
        self, row_ids: Int64Array, starts: Int32Array, ends: Int32Array, is_literal: BoolArray
    ) -> Int32Array:
        parts = [
            self.token_ids[row_id, start:end]
            for row_id, start, end in zip(
                row_ids[is_literal].tolist(),
                starts[is_literal].tolist(),
                ends[is_literal].tolist(),
                strict=True,
            )
        ]
        return np.concatenate(parts) if parts else _NO_TOKENS


def _ragged(
    row_ids: Int64Array, starts: Int64Array, counts: Int32Array
) -> tuple[Int64Array, Int64Array]:
    """Row and column of `counts[i]` neighbours from column `starts[i]` of each row on."""
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(row_ids, counts), np.repeat(starts, counts) + offsets
