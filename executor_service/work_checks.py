"""Checks of the rows of `work` that depend on what the row changes of the batch leave behind.

All functions raise BatchRefused. The batch is otherwise checked: rows exist, positions are covered.
"""

from __future__ import annotations

import numpy as np

from executor_service.batch import BatchContent, BatchRefused, StepErrorReason
from executor_service.executor_info import ExecutorInfo
from executor_service.row_table import RowTable
from executor_service.step import Int32Array, Int64Array


def check_window(content: BatchContent, rows: RowTable, info: ExecutorInfo) -> None:
    """No row needs an entry of its block table that is -1. Without a window there is none."""
    window, work = info.model.sliding_window, content.work
    if window is None:
        return
    first_positions = np.maximum(work.num_computed_tokens.astype(np.int64) - window + 1, 0)
    firsts = first_positions // info.block_size
    ends = work.num_computed_tokens + work.num_new_tokens
    lasts = (ends - 1) // info.block_size
    is_suspect = rows.last_missing.take(work.row_ids) >= firsts
    given = _rows_given_missing_blocks(content)
    if len(given):
        is_suspect |= np.isin(work.row_ids, given)
    for index in np.flatnonzero(is_suspect).tolist():
        first, row_id = int(firsts[index]), int(work.row_ids[index])
        needed = _table_after(content, row_id, rows)[first : int(lasts[index]) + 1]
        if np.count_nonzero(needed < 0):
            raise BatchRefused(
                StepErrorReason.BLOCK_OUT_OF_RANGE,
                "work.row_ids",
                f"entry {first + int((needed < 0).argmax())} of the block table of row {row_id} is"
                f" -1; allowed: a block, since positions from {first_positions[index]} on are read",
            )


def _rows_given_missing_blocks(content: BatchContent) -> Int32Array:
    """Rows that this batch gives an entry -1; a row may occur several times."""
    found = [np.empty(0, np.int32)]
    for change in (content.new_rows, content.table_writes):
        if change is not None and len(change.block_ids):
            owners = np.repeat(change.row_ids, np.diff(change.block_offsets))
            found.append(owners[change.block_ids < 0])
    return np.concatenate(found)


def _table_after(content: BatchContent, row_id: int, rows: RowTable) -> Int32Array:
    """The block table of a row as this batch leaves it."""
    table = rows.block_table(row_id)
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
    """The rows do not have more distinct adapters than the executor takes in one step."""
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
            f"their rows have {num_adapters} distinct adapters; allowed: at most {limit}",
        )
