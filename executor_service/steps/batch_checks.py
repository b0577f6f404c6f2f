"""Checks of a whole batch, which run before anything is changed.

All functions raise BatchRefused. Shape letters: N row ids (`max_num_rows`), R rows of the step.
"""

from __future__ import annotations

import numpy as np

from executor_service.steps.batch import (
    BatchContent,
    BatchRefused,
    StepErrorReason,
    TableWrites,
    Work,
)
from executor_service.steps.executor_info import ExecutorInfo, Feature
from executor_service.steps.new_row_checks import (
    check_all,
    check_at_least,
    check_below,
    check_distinct_blocks,
    check_feature,
    check_length,
    check_new_rows,
    check_not_above,
    check_offsets,
    check_rows,
    check_table_blocks,
    check_table_lengths,
)
from executor_service.steps.row_table import RowTable
from executor_service.steps.step import BlockMoves, BoolArray, Int32Array, Int64Array
from executor_service.steps.step_input import first_positions

_MALFORMED = StepErrorReason.MALFORMED
_BLOCK = StepErrorReason.BLOCK_OUT_OF_RANGE
_POSITION = StepErrorReason.POSITION_OUT_OF_RANGE
_LIMIT = StepErrorReason.LIMIT_EXCEEDED


def check_batch(
    content: BatchContent, is_snapshot: bool, rows: RowTable, info: ExecutorInfo, step_id: int
) -> None:
    """Raises BatchRefused unless `content` may be applied to `rows` and run as `step_id`."""
    exists, num_blocks = _check_row_changes(content, is_snapshot, rows, info)
    _check_moves(content, info)
    work = content.work
    _check_work_lengths(work)
    if work.reports_parts:
        check_feature(Feature.PARTIAL_RESULTS, info, "work.reports_parts")
    if len(work.row_ids):
        num_tokens = _check_work_rows(work, exists, info)
        num_more = check_several(work, num_tokens, info) if work.has_several else None
        _check_positions(work, num_blocks, num_more, info)
        check_window(content, rows, info, step_id)
        check_adapters(content, rows, info)
        _check_tokens(work, num_tokens, info)


def _check_row_changes(
    content: BatchContent, is_snapshot: bool, rows: RowTable, info: ExecutorInfo
) -> tuple[BoolArray, Int32Array]:
    """Returns which rows exist after the row changes, and the lengths of their tables; [N] each."""
    exists, num_blocks = rows.exists, rows.tables.lengths
    if is_snapshot:
        exists, num_blocks = np.zeros_like(exists), np.zeros_like(num_blocks)
        if len(content.removed_row_ids):
            raise BatchRefused(
                _MALFORMED,
                "removed_row_ids",
                f"{len(content.removed_row_ids)} elements; allowed: none in a snapshot",
            )
    elif len(content.removed_row_ids):
        check_rows(content.removed_row_ids, exists, "removed_row_ids")
        exists, num_blocks = exists.copy(), num_blocks.copy()
        exists[content.removed_row_ids] = False
        num_blocks[content.removed_row_ids] = 0
    if content.new_rows is not None:
        new_num_blocks = check_new_rows(content.new_rows, exists, info)
        exists, num_blocks = exists.copy(), num_blocks.copy()
        exists[content.new_rows.row_ids] = True
        num_blocks[content.new_rows.row_ids] = new_num_blocks
    if content.table_writes is not None:
        written = _check_table_writes(content.table_writes, exists, num_blocks, info)
        num_blocks = num_blocks.copy()
        num_blocks[content.table_writes.row_ids.astype(np.intp)] = written
    return exists, num_blocks


def _check_table_writes(
    writes: TableWrites, exists: BoolArray, num_blocks: Int32Array, info: ExecutorInfo
) -> Int32Array:
    """Returns the lengths that the block tables of `writes.row_ids` will have."""
    num_writes = len(writes.row_ids)
    check_length(
        writes.start_indexes, num_writes, "table_writes.start_indexes", "table_writes.row_ids"
    )
    check_rows(writes.row_ids, exists, "table_writes.row_ids")
    offsets = writes.block_offsets
    check_offsets(offsets, num_writes, len(writes.block_ids), "table_writes.block_offsets")
    path = "table_writes.start_indexes"
    lengths = num_blocks.take(writes.row_ids)
    check_at_least(writes.start_indexes, 0, _POSITION, path)
    check_not_above(writes.start_indexes, lengths, _POSITION, path)
    check_table_blocks(writes.block_ids, info, "table_writes.block_ids")
    ends = writes.start_indexes + (offsets[1:] - offsets[:-1])
    check_table_lengths(ends, info, "table_writes.block_offsets")
    return np.maximum(lengths, ends)


def _check_moves(content: BatchContent, info: ExecutorInfo) -> None:
    num_device, num_host = info.num_device_blocks, info.num_host_blocks
    _check_phase(content.swap_out, num_device, num_host, "swap_out")
    _check_phase(content.swap_in, num_host, num_device, "swap_in")
    _check_phase(content.copy, num_device, num_device, "copy")
    copy = content.copy
    if len(copy.sources):
        overlap = np.intersect1d(copy.sources, copy.destinations)
        if len(overlap):
            raise BatchRefused(
                StepErrorReason.BLOCK_OVERLAP,
                "copy.destination_block_ids",
                f"block {overlap[0]} is a source and a destination; allowed: one of the two",
            )


def _check_phase(moves: BlockMoves, num_sources: int, num_destinations: int, path: str) -> None:
    if len(moves.sources) == 0 and len(moves.destinations) == 0:
        return
    source_path, destination_path = f"{path}.source_block_ids", f"{path}.destination_block_ids"
    check_length(moves.destinations, len(moves.sources), destination_path, source_path)
    check_below(moves.sources, num_sources, _BLOCK, source_path)
    check_below(moves.destinations, num_destinations, _BLOCK, destination_path)
    check_distinct_blocks(moves.destinations, destination_path)


def _check_work_lengths(work: Work) -> None:
    num_rows = len(work.row_ids)
    check_length(work.num_computed_tokens, num_rows, "work.num_computed_tokens", "work.row_ids")
    check_length(work.num_new_tokens, num_rows, "work.num_new_tokens", "work.row_ids")
    if len(work.sampled_steps_back):
        path = "work.sampled_steps_back"
        check_length(work.sampled_steps_back, num_rows, path, "work.row_ids")
    if len(work.samples):
        check_length(work.samples, num_rows, "work.samples", "work.row_ids")
    if num_rows == 0:
        check_length(work.token_ids, 0, "work.token_ids", "work.row_ids")


def _check_work_rows(work: Work, exists: BoolArray, info: ExecutorInfo) -> int:
    """Returns the number of input tokens of all rows."""
    num_rows = len(work.row_ids)
    if num_rows > len(exists):
        allowed = f"allowed: at most {len(exists)}"
        raise BatchRefused(_LIMIT, "work.row_ids", f"{num_rows} rows; {allowed}")
    check_rows(work.row_ids, exists, "work.row_ids")
    check_at_least(work.num_new_tokens, 1, _MALFORMED, "work.num_new_tokens")
    num_tokens = int(np.add.reduce(work.num_new_tokens.astype(np.int64)))
    limit = info.limits.max_num_batched_tokens
    if num_tokens > limit:
        raise BatchRefused(
            _LIMIT, "work.num_new_tokens", f"{num_tokens} tokens in total; allowed: at most {limit}"
        )
    if len(work.samples) and np.maximum.reduce(work.samples) > 1:
        raise BatchRefused(
            _MALFORMED, "work.samples", f"an element is {work.samples.max()}; allowed: 0 and 1"
        )
    return num_tokens


def _check_positions(
    work: Work, num_blocks: Int32Array, num_more: Int64Array | None, info: ExecutorInfo
) -> None:
    """Checks that all positions lie in the row's block table and in `max_model_len`.

    `num_more`: [R], tokens that rows may write after their input; None if no row writes any.
    """
    computed = work.num_computed_tokens
    check_at_least(computed, 0, _POSITION, "work.num_computed_tokens")
    num_slots = num_blocks.take(work.row_ids).astype(np.int64) * info.block_size
    if info.model.is_uncached:
        check_below(computed, 1, _POSITION, "work.num_computed_tokens")
        num_slots = np.full(len(computed), info.model.max_model_len, np.int64)
    # The rotary angles end at max_model_len; the last block may have more slots than that.
    np.minimum(num_slots, info.model.max_model_len, out=num_slots)
    num_written = work.num_new_tokens if num_more is None else work.num_new_tokens + num_more
    is_outside = computed > num_slots - num_written
    if np.count_nonzero(is_outside):
        index = int(is_outside.argmax())
        last = int(computed[index]) + int(num_written[index]) - 1
        raise BatchRefused(
            _POSITION,
            "work.num_computed_tokens",
            f"the last position of row {work.row_ids[index]} is {last}; allowed: below"
            f" {num_slots[index]}, limited by its block table and max_model_len"
            f" {info.model.max_model_len}",
        )


def _check_tokens(work: Work, num_tokens: int, info: ExecutorInfo) -> None:
    steps_back, num_rows = work.sampled_steps_back, len(work.row_ids)
    if len(steps_back):
        path = "work.sampled_steps_back"
        check_at_least(steps_back, 0, _MALFORMED, path)
        if info.model.vectors is not None:
            check_all(steps_back == 0, steps_back, path, "allowed: 0, as no row samples a token")
        # As many tokens as rows means one token each: no check per row is needed.
        if num_tokens != num_rows:
            is_right = (steps_back == 0) | (work.num_new_tokens == 1)
            check_all(is_right, steps_back, path, "allowed: 0 for a row with several input tokens")
        num_tokens -= int(np.count_nonzero(steps_back))
    check_length(work.token_ids, num_tokens, "work.token_ids", "work.num_new_tokens")
    check_below(
        work.token_ids,
        info.model.vocab_size,
        StepErrorReason.TOKEN_OUT_OF_RANGE,
        "work.token_ids",
    )


def check_window(content: BatchContent, rows: RowTable, info: ExecutorInfo, step_id: int) -> None:
    """Checks that no row reads an entry of its block table that is -1.

    Only models with a sliding window may have such entries.
    """
    window, work = info.model.sliding_window, content.work
    if window is None:
        return
    starts = first_positions(step_id, work, rows).astype(np.int64)
    first_needed = np.maximum(starts - window + 1, 0)
    firsts = first_needed // info.block_size
    ends = work.num_computed_tokens + work.num_new_tokens
    lasts = (ends - 1) // info.block_size
    is_suspect = rows.tables.last_missing.take(work.row_ids) >= firsts
    incomplete_row_ids = _rows_given_missing_blocks(content)
    if len(incomplete_row_ids):
        is_suspect |= np.isin(work.row_ids, incomplete_row_ids)
    for index in np.flatnonzero(is_suspect).tolist():
        first, row_id = int(firsts[index]), int(work.row_ids[index])
        needed = _table_after(content, row_id, rows)[first : int(lasts[index]) + 1]
        if np.count_nonzero(needed < 0):
            raise BatchRefused(
                StepErrorReason.BLOCK_OUT_OF_RANGE,
                "work.row_ids",
                f"entry {first + int((needed < 0).argmax())} of the block table of row {row_id} is"
                f" -1; allowed: a block, since positions from {first_needed[index]} on are read",
            )


def _rows_given_missing_blocks(content: BatchContent) -> Int32Array:
    """Returns the rows whose tables get an entry -1 in this batch; a row may occur repeatedly."""
    found = [np.empty(0, np.int32)]
    for change in (content.new_rows, content.table_writes):
        if change is not None and len(change.block_ids):
            owners = np.repeat(change.row_ids, np.diff(change.block_offsets))
            found.append(owners[change.block_ids < 0])
    return np.concatenate(found)


def _table_after(content: BatchContent, row_id: int, rows: RowTable) -> Int32Array:
    """Returns the block table of a row as this batch leaves it."""
    table = rows.tables.of_row(row_id)
    new, writes = content.new_rows, content.table_writes
    if new is not None and len(index := np.flatnonzero(new.row_ids == row_id)):
        table = _part(new.block_ids, new.block_offsets, index)
    if writes is not None and len(index := np.flatnonzero(writes.row_ids == row_id)):
        blocks = _part(writes.block_ids, writes.block_offsets, index)
        start = int(writes.start_indexes[index[0]])
        table = np.concatenate([table[:start], blocks, table[start + len(blocks) :]])
    return table


def _part(data: Int32Array, offsets: Int32Array, index: Int64Array) -> Int32Array:
    return data[offsets[index[0]] : offsets[index[0] + 1]]


def check_adapters(content: BatchContent, rows: RowTable, info: ExecutorInfo) -> None:
    """Checks that the rows use at most `max_adapters_per_step` distinct adapters."""
    limit, row_ids = info.limits.max_adapters_per_step, content.work.row_ids
    if limit is None:
        return
    adapters = dict.fromkeys(row_ids.tolist(), "")
    adapters.update(zip(adapters, rows.adapters(row_ids), strict=False))
    if content.new_rows is not None:
        new = zip(content.new_rows.row_ids.tolist(), content.new_rows.row_adapters, strict=True)
        adapters.update({row_id: name for row_id, name in new if row_id in adapters})
    num_adapters = len({name for name in adapters.values() if name})
    if num_adapters > limit:
        raise BatchRefused(
            StepErrorReason.LIMIT_EXCEEDED,
            "work.row_ids",
            f"the rows have {num_adapters} distinct adapters; allowed: at most {limit}",
        )


# -- Checks of rows that may get several tokens ----------------------------------------------------
#
# All functions raise BatchRefused.

_RUNS, _DRAFTS = "work.num_run_on_tokens", "work.draft_offsets"


def check_several(work: Work, num_tokens: int, info: ExecutorInfo) -> Int64Array:
    """Returns the number of slots that each row may write after its input, [R].

    `num_tokens`: input tokens of all rows.
    """
    return _num_run_on(work, info) + _num_drafts(work, num_tokens, info)


def _num_run_on(work: Work, info: ExecutorInfo) -> Int64Array:
    counts, num_rows = work.num_run_on_tokens, len(work.row_ids)
    if not len(counts):
        return np.zeros(num_rows, np.int64)
    check_feature(Feature.SEVERAL_TOKENS, info, _RUNS)
    check_length(counts, num_rows, _RUNS, "work.row_ids")
    check_at_least(counts, 0, StepErrorReason.MALFORMED, _RUNS)
    _check_sampling(work, counts, _RUNS)
    return counts.astype(np.int64)


def _num_drafts(work: Work, num_tokens: int, info: ExecutorInfo) -> Int64Array:
    offsets, num_drafts, num_rows = work.draft_offsets, len(work.draft_token_ids), len(work.row_ids)
    if not len(offsets):
        check_length(work.draft_token_ids, 0, "work.draft_token_ids", _DRAFTS)
        return np.zeros(num_rows, np.int64)
    check_feature(Feature.SEVERAL_TOKENS, info, _DRAFTS)
    check_offsets(offsets, num_rows, num_drafts, _DRAFTS)
    counts: Int32Array = np.diff(offsets)
    _check_sampling(work, counts, _DRAFTS)
    limit = info.limits.max_num_batched_tokens
    if num_tokens + num_drafts > limit:
        raise BatchRefused(
            StepErrorReason.LIMIT_EXCEEDED,
            _DRAFTS,
            f"{num_drafts} drafts and {num_tokens} tokens; allowed: at most {limit} in total",
        )
    check_below(
        work.draft_token_ids,
        info.model.vocab_size,
        StepErrorReason.TOKEN_OUT_OF_RANGE,
        "work.draft_token_ids",
    )
    return counts.astype(np.int64)


def _check_sampling(work: Work, counts: Int32Array, path: str) -> None:
    if len(work.samples):
        is_right = (counts == 0) | (work.samples != 0)
        check_all(is_right, counts, path, "allowed: 0 for a row that does not sample")
