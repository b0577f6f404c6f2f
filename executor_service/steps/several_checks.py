"""What can be wrong with rows that may get several tokens. All functions raise BatchRefused."""

from __future__ import annotations

import numpy as np

from executor_service.steps.batch import BatchRefused, StepErrorReason, Work
from executor_service.steps.column_checks import (
    check_all,
    check_at_least,
    check_below,
    check_length,
    check_offsets,
)
from executor_service.steps.executor_info import ExecutorInfo, Feature
from executor_service.steps.new_row_checks import check_feature
from executor_service.steps.step import Int32Array, Int64Array

_RUNS, _DRAFTS = "work.num_run_on_tokens", "work.draft_offsets"


def check_several(work: Work, num_tokens: int, info: ExecutorInfo) -> Int64Array:
    """How many slots each row may write behind its input, [R].

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
            f"{num_drafts} drafts beside {num_tokens} tokens; allowed: at most {limit} in all",
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
