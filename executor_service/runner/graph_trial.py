"""Steps that recordings are tried with: what a replay must say like the model without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from executor_service.device.kv_cache import KVCache
from executor_service.model.input_batch import PassRows, Readout
from executor_service.runner.step_shapes import StepShape
from executor_service.steps.step import BoolArray, Int32Array, Int64Array
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import lay_out_rows


def trial_rows(shape: StepShape, cache: KVCache, max_model_len: int, vocab_size: int) -> PassRows:
    """Decodes, and in a shape that has room for it a prompt; a token less than there is room for.

    As many as the pool has blocks for: each row has its own, from block 0 on.
    """
    block_size, num_blocks = cache.block_size, cache.num_device_blocks
    if shape.is_decode:
        new = np.ones(min(shape.num_decodes, num_blocks), np.int64)
    else:
        num_decodes = min(shape.num_tokens // 4, shape.num_lines - 1, num_blocks // 2)
        room = min((num_blocks - num_decodes) * block_size, max_model_len)
        new = np.ones(num_decodes + 1, np.int64)
        new[-1] = max(1, min(shape.num_tokens - 1 - num_decodes, room))
    rows = np.arange(len(new))
    computed = np.where(new == 1, rows % min(block_size, max_model_len), 0)
    num_blocks_of_row = -(-(computed + new) // block_size)
    columns = np.arange(num_blocks_of_row.max())
    first = np.cumsum(num_blocks_of_row) - num_blocks_of_row
    is_used = columns < num_blocks_of_row[:, None]
    tables = np.where(is_used, first[:, None] + columns, 0).astype(np.int32)
    layout = lay_out_rows(tables, computed, new, block_size)
    token_ids = np.arange(int(new.sum())) % vocab_size
    return PassRows(token_ids, computed, tables, layout, np.cumsum(new) - 1)


def run_lengths(rows: PassRows, block_size: int) -> Int32Array:
    """How many tokens each of the trial's decodes may get: two where its block has room, or one."""
    room = block_size - 1 - rows.num_computed_tokens % block_size
    return np.minimum(room + 1, 2).astype(np.int32)


def rows_after(
    rows: PassRows, token_ids: Int64Array, goes_on: BoolArray, block_size: int
) -> PassRows:
    """`rows` of a decode a token later, which is that of `token_ids` [R].

    Who does not go on stays where he is, and writes to no slot.
    """
    positions = rows.num_computed_tokens + goes_on
    blocks = rows.block_tables[np.arange(rows.num_rows), positions // block_size].astype(np.int64)
    slots = np.where(goes_on, blocks * block_size + positions % block_size, -1)
    layout = replace(rows.layout, positions=positions, slots=slots)
    return replace(rows, token_ids=token_ids, num_computed_tokens=positions, layout=layout)


def no_rows() -> PassRows:
    """A step of none: what is added to it is all that is recorded with.

    What Python decides by the rows of a recording would stay decided, and be found in a trial.
    """
    nothing, tables = np.empty(0, np.int64), np.empty((0, 0), np.int32)
    layout = lay_out_rows(tables, nothing, nothing, 1)
    return PassRows(nothing, nothing, tables, layout, nothing)


def trial_draws(num_rows: int, vocab_size: int) -> DrawRows:
    """Rows that are greedy, drawn whole, and cut."""
    rows = np.arange(num_rows)
    is_cut = rows % 3 == 2
    return DrawRows(
        temperatures=(rows % 3 > 0).astype(np.float32),
        top_k=np.where(is_cut, min(20, vocab_size), vocab_size).astype(np.int32),
        top_p=np.where(is_cut, 0.9, 1.0),
        min_p=np.zeros(num_rows, np.float32),
        seeds=rows.astype(np.int64),
        positions=rows.astype(np.int64),
    )


def readout_of_lines(num_lines: int) -> Readout:
    """Of rows that all sample."""
    no_rows = np.empty(0, dtype=np.int64)
    return Readout(np.arange(num_lines), no_rows, no_rows)
