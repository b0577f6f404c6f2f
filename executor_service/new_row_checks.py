"""What can be wrong with rows to add, and with block tables; all functions raise BatchRefused.

Shape letters: N row ids (`max_num_rows`).
"""

from __future__ import annotations

import numpy as np

from executor_service.batch import BatchRefused, Feature, NewCross, NewRows, StepErrorReason
from executor_service.column_checks import (
    check_at_least,
    check_below,
    check_free_rows,
    check_length,
    check_offsets,
)
from executor_service.executor_info import ExecutorInfo
from executor_service.params_checks import check_feature, check_sampling_params
from executor_service.step import BoolArray, Int32Array, Int64Array

_MALFORMED = StepErrorReason.MALFORMED
_BLOCK = StepErrorReason.BLOCK_OUT_OF_RANGE
_POSITION = StepErrorReason.POSITION_OUT_OF_RANGE
_TOKEN = StepErrorReason.TOKEN_OUT_OF_RANGE


def check_new_rows(rows: NewRows, exists: BoolArray, info: ExecutorInfo) -> Int32Array:
    """Returns the lengths of the block tables of the new rows; `exists` [N]: ids that are taken."""
    num_rows = len(rows.row_ids)
    for name in ("sampling_params_indexes", "seeds", "num_prompt_tokens"):
        check_length(getattr(rows, name), num_rows, f"new_rows.{name}", "new_rows.row_ids")
    check_free_rows(rows.row_ids, exists, "new_rows.row_ids")
    check_below(
        rows.sampling_params_indexes,
        len(rows.sampling_params),
        _MALFORMED,
        "new_rows.sampling_params_indexes",
    )
    check_at_least(rows.num_prompt_tokens, 0, _MALFORMED, "new_rows.num_prompt_tokens")
    check_offsets(rows.block_offsets, num_rows, len(rows.block_ids), "new_rows.block_offsets")
    check_table_blocks(rows.block_ids, info, "new_rows.block_ids")
    num_blocks = np.diff(rows.block_offsets)
    check_table_lengths(num_blocks, info, "new_rows.block_offsets")
    for index, params in enumerate(rows.sampling_params):
        check_sampling_params(params, info, f"new_rows.sampling_params[{index}]")
    _check_histories(rows, info)
    _check_adapters(rows, info)
    if rows.cross is not None:
        _check_cross(rows.cross, num_rows, info)
    return num_blocks


def _check_histories(rows: NewRows, info: ExecutorInfo) -> None:
    num_tokens = len(rows.history_token_ids)
    check_offsets(rows.history_offsets, len(rows.row_ids), num_tokens, "new_rows.history_offsets")
    lengths = np.diff(rows.history_offsets)
    params_need = np.array([params.needs_history for params in rows.sampling_params], np.bool_)
    needs_history = params_need[rows.sampling_params_indexes]
    is_right = np.where(needs_history, lengths >= rows.num_prompt_tokens, lengths == 0)
    if not is_right.all():
        index = int((~is_right).argmax())
        allowed = f"at least the {rows.num_prompt_tokens[index]} of its prompt"
        raise BatchRefused(
            _MALFORMED,
            "new_rows.history_offsets",
            f"row {rows.row_ids[index]} has a history of {lengths[index]} tokens; allowed:"
            f" {allowed if needs_history[index] else 'none with its sampling params'}",
        )
    check_below(
        rows.history_token_ids,
        info.model.vocab_size,
        _TOKEN,
        "new_rows.history_token_ids",
    )


def _check_adapters(rows: NewRows, info: ExecutorInfo) -> None:
    path = "new_rows.adapters"
    if rows.adapters:
        check_feature(Feature.ADAPTERS, info, path)
    for index, name in enumerate(rows.adapters):
        if not name or name in rows.adapters[:index]:
            problem = f"element {index} is {name!r}; allowed: distinct names that are not empty"
            raise BatchRefused(_MALFORMED, path, problem)
    if len(rows.adapter_indexes):
        path = "new_rows.adapter_indexes"
        check_length(rows.adapter_indexes, len(rows.row_ids), path, "new_rows.row_ids")
        check_below(rows.adapter_indexes, len(rows.adapters), _MALFORMED, path, low=-1)


def _check_cross(cross: NewCross, num_rows: int, info: ExecutorInfo) -> None:
    counts, path = cross.num_encoder_tokens, "new_rows.num_encoder_tokens"
    check_length(counts, num_rows, path, "new_rows.row_ids")
    check_at_least(counts, 0, _MALFORMED, path)
    if np.count_nonzero(counts):
        check_feature(Feature.CROSS_ATTENTION, info, path)
    path = "new_rows.cross_block_offsets"
    check_offsets(cross.block_offsets, num_rows, len(cross.block_ids), path)
    check_below(cross.block_ids, info.num_device_blocks, _BLOCK, "new_rows.cross_block_ids")
    num_blocks = np.diff(cross.block_offsets).astype(np.int64)
    _check_each(
        (num_blocks == 0) | (counts > 0),
        num_blocks,
        _MALFORMED,
        path,
        "none without encoder tokens",
    )
    enough = num_blocks * info.block_size >= counts
    _check_each(enough, num_blocks, _POSITION, path, "enough for the row's encoder tokens")
    path = "new_rows.encoder_offsets"
    check_offsets(cross.encoder_offsets, num_rows, len(cross.encoder_token_ids), path)
    lengths = np.diff(cross.encoder_offsets)
    all_or_none = (lengths == 0) | (lengths == counts)
    _check_each(all_or_none, lengths, _MALFORMED, path, "all of the row's encoder tokens, or none")
    check_below(
        cross.encoder_token_ids, info.model.vocab_size, _TOKEN, "new_rows.encoder_token_ids"
    )


def _check_each(
    is_right: BoolArray,
    counts: Int32Array | Int64Array,
    reason: StepErrorReason,
    path: str,
    allowed: str,
) -> None:
    """`is_right` holds for every new row; `counts`: how many elements each has."""
    if not is_right.all():
        index = int((~is_right).argmax())
        raise BatchRefused(
            reason, path, f"new row {index} has {counts[index]} elements; allowed: {allowed}"
        )


def check_table_blocks(block_ids: Int32Array, info: ExecutorInfo, path: str) -> None:
    """Each is a device block, or -1 where a sliding window lets entries be missing."""
    low = 0 if info.model.sliding_window is None else -1
    check_below(block_ids, info.num_device_blocks, _BLOCK, path, low=low)


def check_table_lengths(num_blocks: Int32Array, info: ExecutorInfo, path: str) -> None:
    """A table longer than the pool would name a block twice; this bounds the row table's memory.

    With a sliding window it may be longer: what lies behind the window names no block any more.
    """
    limit = info.num_device_blocks
    if info.model.sliding_window is not None:
        limit = max(limit, -(-info.model.max_model_len // info.block_size))
    if len(num_blocks) and np.maximum.reduce(num_blocks) > limit:
        raise BatchRefused(
            _POSITION,
            path,
            f"a block table of {num_blocks.max()} blocks; allowed: at most {limit}",
        )
