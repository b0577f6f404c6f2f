"""Row columns: hot state of running sequences as arrays, so that a step costs what changed."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from scheduler_service.scheduler.values import (
    NO_ROW,
    BoolArray,
    Drafts,
    Int32Array,
    Int64Array,
    Request,
    RowWork,
    Sequence,
    SequenceStatus,
    TableWrites,
)

NO_STAY = 0
# Pauses between steps that only repeat rows whose grammar is being compiled.
_MIN_PAUSE_NS = 2_000_000
_MAX_PAUSE_NS = 50_000_000
RELEASED = -1
_NO_CHAIN: list[bytes] = []

_NO_TOKENS = np.empty(0, np.int32)
_NO_ROWS = np.empty(0, np.int64)
# Decode steps use zero-dimensional arrays as constants: numpy needs longer to convert a Python
# integer (0.3 us) than to add it to 64 elements. For the same reason tables are indexed with int64.
ZERO: Int32Array = np.array(0, np.int32)
ONE: Int32Array = np.array(1, np.int32)
_NO_WRITES = TableWrites(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS)


def _sparse_table(num_rows: int, width: int) -> Int32Array:
    """Returns a large zeroed int32 table whose memory is taken in small pages, as it is written.

    `numpy.zeros` asks for huge pages, and a hardly used row would take a whole one.
    """
    pages = mmap.mmap(-1, num_rows * width * np.dtype(np.int32).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.int32).reshape(num_rows, width)


class RowColumns:
    """Columns of running sequences, indexed by row id.

    Tokens: `token_ids` [N, T] int32: known tokens. `num_known`: number of known tokens.
    `num_tokens`: known tokens and those promised by steps in flight. `num_computed`: tokens whose
    KV is written, or will be by a step in flight. `num_unsure`: by how much `num_tokens` and
    `num_computed` may be too large, because steps in flight may bring fewer tokens than they are
    allowed to. `stop_len`: number of tokens at which the sequence ends.

    Blocks: `block_tables` [N, W] int32. `num_slots`: tokens that fit into the block table.
    `num_told_slots`: the same for the part of the table that the executor was sent. `num_released`:
    leading blocks given back, behind the sliding window. `run_limit`: the row may run while
    `num_computed` is less; then it has a slot, and does not end with the tokens promised.

    Sampling: `promises`: 1 if a sampled token becomes part of the sequence at once; 0 if something
    else chooses the token, or if it may not come. `may_repeat`: 1 if the last token may have to be
    computed again, because the row has a grammar and no token yet in this stay; else 0.
    `unsampled_since_ns`: time since which the row repeats its last token; 0 if it never did.
    `ask_alone_at_ns`: time of the next step of such rows alone; 0 for at once. `is_held_back`: the
    row is not planned before all its tokens are known; `has_held_back`: there may be such rows.
    `sampled_in_step`: the step that samples the last token; 0 if the executor does not sample it.
    `last_step_id`: the latest step that has the row.

    Owners: `stay_ids`: number of the stay, unique; 0 for a free row. `client_keys`: the owner's
    name for the request. `is_plain`: a token and that name are all that the owner needs. `chains`:
    hash chains of the sequences in which each hash follows from the one before; else empty.
    `priority`: that of the request. `target_itl_ms`: its wanted time between tokens; 0 for none.
    `num_with_target`: number of rows with such a target.
    """

    def __init__(self, max_num_rows: int, max_len: int, block_size: int, max_blocks: int) -> None:
        self.max_num_rows = max_num_rows
        self.block_size = block_size
        self._block_size: Int32Array = np.array(block_size, np.int32)
        self._block_of_tokens = f"V{block_size * np.dtype(np.int32).itemsize}"
        self.sequences: list[Sequence | None] = [None] * max_num_rows
        self.token_ids = _sparse_table(max_num_rows, -(-max_len // block_size) * block_size)
        self.block_tables = _sparse_table(max_num_rows, max_blocks)
        self.num_known = np.zeros(max_num_rows, np.int32)
        self.num_tokens = np.zeros(max_num_rows, np.int32)
        self.num_computed = np.zeros(max_num_rows, np.int32)
        self.num_unsure = np.zeros(max_num_rows, np.int32)
        self.num_slots = np.zeros(max_num_rows, np.int32)
        self.num_told_slots = np.zeros(max_num_rows, np.int32)
        self.num_released = np.zeros(max_num_rows, np.int32)
        self.stop_len = np.zeros(max_num_rows, np.int32)
        self.run_limit = np.ones(max_num_rows, np.int32)
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
        self._ones = np.ones(max_num_rows, np.int32)
        self.chains: list[list[bytes]] = [_NO_CHAIN] * max_num_rows
        self.priority = np.zeros(max_num_rows, np.int32)
        self.target_itl_ms = np.zeros(max_num_rows, np.int32)
        self.num_with_target = 0
        self.is_plain = np.zeros(max_num_rows, np.bool_)
        self.num_not_plain = 0
        self.num_without_promise = 0
        self.num_with_prompt_logprobs = 0
        self._last_stay_id = NO_STAY
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        # Parallel lists, most urgent row first.
        self._keys: list[tuple[int, ...]] = []
        self._row_order: list[int] = []
        self._order: Int64Array | None = None
        self._key_of_row: list[tuple[int, ...]] = [()] * max_num_rows
        self._class_of_row: list[tuple[int, ...]] = [()] * max_num_rows

    def __len__(self) -> int:
        return len(self._row_order)

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free_rows)

    @property
    def order(self) -> Int64Array:
        """Row ids, most urgent first."""
        if self._order is None:
            self._order = np.array(self._row_order, np.int64)
        return self._order

    def find_current(self, work: RowWork) -> BoolArray | None:
        """Finds the rows of a step whose sequences are still there: [R] bool; None for all."""
        if work.row_ids is self._order:
            return None  # no sequence came or left since the step was planned
        is_current: BoolArray = self.stay_ids[work.row_ids] == work.stay_ids
        return None if np.count_nonzero(is_current) == len(is_current) else is_current

    @property
    def all_decode(self) -> bool:
        """Whether each row has a single token to compute, and a slot for it."""
        is_decode = self.num_tokens - self.num_computed == ONE
        is_decode &= self.num_computed < self.run_limit
        return bool(np.count_nonzero(is_decode) == len(self._row_order))

    @property
    def stuck(self) -> Int64Array:
        """Rows that cannot run before their table grows or their sequence ends, in order."""
        is_stuck = self.num_computed >= self.run_limit
        if not np.count_nonzero(is_stuck):
            return _NO_ROWS
        order = self.order
        return order[is_stuck[order]]

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, most urgent first."""
        return [self.sequence(row_id) for row_id in self._row_order]

    def step_class(self, row_id: int) -> tuple[int, ...]:
        """Returns the step class of a row; rows of one class are neighbours in the order."""
        return self._class_of_row[row_id]

    @property
    def least_urgent(self) -> Sequence:
        """Least urgent running sequence; at least one must run."""
        return self.sequence(self._row_order[-1])

    def are_all_of(self, request: Request) -> bool:
        """Returns whether all rows belong to `request`, whose rows are neighbours in the order."""
        ends = (self._row_order[0], self._row_order[-1])
        return all(self.sequence(row_id).request is request for row_id in ends)

    def sequence(self, row_id: int) -> Sequence:
        """Returns the sequence that has the row."""
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
        """Gives `sequence` a row with an empty table; mutates its `row_id` and `status`."""
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
        params, scheduling = request.params, request.scheduling
        self.priority[row_id] = scheduling.priority
        self.target_itl_ms[row_id] = scheduling.target_itl_ms or 0
        self.num_with_target += scheduling.target_itl_ms is not None
        is_simple = scheduling.uses_prefix_cache and not scheduling.num_public_prefix_tokens
        self.chains[row_id] = sequence.block_hashes if is_simple else _NO_CHAIN
        self.is_plain[row_id] = is_plain = (
            params.num_logprobs is None
            and params.num_sequences == 1
            and params.beam is None
            and params.pooling is None
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
        """Frees the row; copies known tokens and the number of promised ones to the sequence."""
        row_id = sequence.row_id
        position = bisect_left(self._keys, self._key_of_row[row_id])
        del self._keys[position], self._row_order[position]
        self._order = None
        sequence.token_ids = self.known_tokens(row_id).copy()
        sequence.num_promised = int(self.num_tokens[row_id] - self.num_known[row_id])
        sequence.row_id = NO_ROW
        self.num_not_plain -= not self.is_plain[row_id]
        self.num_without_promise -= not self.promises[row_id]
        self.num_with_target -= sequence.request.scheduling.target_itl_ms is not None
        self.may_repeat[row_id] = 0
        self.num_with_prompt_logprobs -= sequence.request.params.num_prompt_logprobs is not None
        self.num_told_slots[row_id] = self.num_slots[row_id]
        # A free row has nothing to compute, and does not lack a block.
        self.num_tokens[row_id] = self.num_computed[row_id] = 0
        self.run_limit[row_id] = 1
        self.sequences[row_id], self.chains[row_id] = None, _NO_CHAIN
        self.stay_ids[row_id] = NO_STAY
        self._free_rows.append(row_id)

    def known_tokens(self, row_id: int) -> Int32Array:
        """Returns the known tokens of a row, as a view."""
        return self.token_ids[row_id, : self.num_known[row_id]]

    @property
    def block_tokens(self) -> Callable[[int, int], bytes]:
        """Function that returns the tokens, int32, of a row's block at a table index."""
        tokens_at: Callable[[int, int], bytes] = self.token_ids.view(self._block_of_tokens).item
        return tokens_at

    def block_table(self, row_id: int) -> Int32Array:
        """Returns the block table of a row, as a view; -1 where a block was released."""
        return self.block_tables[row_id, : self.num_slots[row_id] // self.block_size]

    def held_blocks(self, row_id: int) -> list[int]:
        """Returns the blocks that a row refers to."""
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
        """Appends the next `counts[i]` blocks to the table of row i; None for one block each."""
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
        """Removes and returns the last `count` blocks of the table of a row."""
        blocks: list[int] = self.block_table(row_id)[-count:].tolist()
        self.num_slots[row_id] -= count * self.block_size
        self.num_told_slots[row_id] = min(self.num_told_slots[row_id], self.num_slots[row_id])
        self.run_limit[row_id] = min(self.num_slots[row_id], self.stop_len[row_id] - 1)
        return blocks

    def release_blocks(self, row_ids: Int64Array, ends: Int32Array) -> Int32Array:
        """Removes and returns the blocks before table index `ends` of each row, row by row."""
        starts = self.num_released[row_ids]
        index = _ragged(row_ids, starts.astype(np.int64), ends - starts)
        blocks: Int32Array = self.block_tables[index]
        self.block_tables[index] = RELEASED
        self.num_released[row_ids] = ends
        return blocks

    def take_table_writes(self, new_row_ids: list[int]) -> TableWrites:
        """Returns the growth of tables that the executor was not sent yet, and counts it as sent.

        Tables of new rows are left out: the executor gets them whole.
        """
        if new_row_ids:
            self.num_told_slots[new_row_ids] = self.num_slots[new_row_ids]
        (row_ids,) = (self.num_told_slots != self.num_slots).nonzero()
        if len(row_ids) == 0:
            return _NO_WRITES
        num_slots, num_told_slots = self.num_slots[row_ids], self.num_told_slots[row_ids]
        self.num_told_slots[row_ids] = num_slots
        starts = num_told_slots // self._block_size
        counts = num_slots - num_told_slots
        first = row_ids, starts.astype(np.int64)
        if np.count_nonzero(counts == self._block_size) == len(counts):
            index, counts = first, self._ones[: len(counts)]
        else:
            counts //= self._block_size
            index = _ragged(*first, counts)
        return TableWrites(row_ids.astype(np.int32), starts, counts, self.block_tables[index])

    def append_token(self, row_id: int, token_id: int) -> None:
        """Appends a token that no step promised to a row."""
        self.token_ids[row_id, self.num_known[row_id]] = token_id
        self.num_known[row_id] += 1
        self.num_tokens[row_id] += 1

    def repeat_last(self, row_id: int, now_ns: int) -> int:
        """Makes a row that `may_repeat` compute its last token once more.

        Returns for how many ns the row has been repeating. A step of such rows alone is due after a
        pause of half that time, within limits.
        """
        self.num_computed[row_id] -= 1
        if self.unsampled_since_ns[row_id] == 0:
            self.unsampled_since_ns[row_id] = now_ns
        waited_ns = now_ns - int(self.unsampled_since_ns[row_id])
        pause_ns = min(max(waited_ns // 2, _MIN_PAUSE_NS), _MAX_PAUSE_NS)
        self.ask_alone_at_ns[row_id] = now_ns + pause_ns
        return waited_ns

    def ask_at_ns(self, row_ids: Int64Array) -> int:
        """Returns the time in ns from which a step of these rows alone is useful; 0 for at once."""
        return int(self.ask_alone_at_ns[row_ids].min()) if self.num_without_promise else 0

    def keep_promises(self, row_ids: Int64Array) -> None:
        """Notes that rows have a token: rows that `may_repeat` promise their tokens from now on."""
        first = row_ids[self.may_repeat[row_ids] > ZERO]
        self.num_tokens[first] += ONE
        self.promises[first] = 1
        self.may_repeat[first] = self.ask_alone_at_ns[first] = 0
        self.num_without_promise -= len(first)

    def forget_samples(self) -> None:
        """Makes all inputs literal: the executor no longer has the tokens that it sampled."""
        self.sampled_in_step[:] = 0

    def plan_work(
        self,
        row_ids: Int64Array,
        num_new_tokens: Int32Array,
        step_id: int,
        num_run_on: Int32Array | None = None,
        drafts: Drafts | None = None,
    ) -> RowWork:
        """Returns the work of step `step_id`, in which row i computes `num_new_tokens[i]`.

        Mutates the columns. `num_run_on`: [R], how many tokens each row may get by running on; None
        for none. `drafts`: draft tokens; None for none. With either of these, all rows sample, and
        all sampled tokens are promised.
        """
        num_computed = self.num_computed[row_ids]
        end = num_computed + num_new_tokens
        step = np.array(step_id)
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
        if self.num_without_promise:
            promises = self.promises[sampling_rows]
            self.num_tokens[sampling_rows] = num_tokens + promises
            self.sampled_in_step[sampling_rows] = step * promises
        else:
            self.num_tokens[sampling_rows] = num_tokens + ONE
            self.sampled_in_step[sampling_rows] = step
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
            assert samples is None, "only sampling rows may get several tokens"
            for column in (self.num_computed, self.num_tokens, self.num_unsure):
                column[row_ids] += num_more
        return work

    def settle(self, row_ids: Int64Array, num_unsure: Int32Array, missing: Int32Array) -> None:
        """Corrects the lengths of rows when the result of a step is known.

        All arrays: [R] int32 or int64. `num_unsure`: tokens that were promised and not sure.
        `missing`: how many of them did not come.
        """
        self.num_unsure[row_ids] -= num_unsure
        self.num_computed[row_ids] -= missing
        self.num_tokens[row_ids] -= missing

    def append_tokens(self, row_ids: Int64Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """Appends `counts[i]` of `token_ids` to row i; the tokens were promised."""
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
    """Returns rows and columns of `counts[i]` neighbours from column `starts[i]` of each row on."""
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(row_ids, counts), np.repeat(starts, counts) + offsets
