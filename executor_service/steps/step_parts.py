"""Parts of a step that are run one after the other, and their scores as those of one step.

Shape letters: R rows of the step, K rows of a part, T input tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_service.steps.step import (
    NO_MOVES,
    BoolArray,
    CrossInput,
    Int32Array,
    Int64Array,
    LogprobColumns,
    StepInput,
)

_NO_TOKENS = np.empty(0, np.int32)


def part_of(
    step: StepInput,
    rows: Int64Array,
    *,
    num_computed_tokens: Int32Array,
    num_new_tokens: Int32Array,
    token_ids: Int32Array,
    samples: BoolArray,
) -> StepInput:
    """A step of `rows` [K] alone, without block moves; `token_ids` [T] are what it computes.

    Nothing is awaited, nothing encoded, and no row has drafts or runs on.
    """
    return replace(
        step,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=step.row_ids[rows],
        num_computed_tokens=num_computed_tokens,
        num_new_tokens=num_new_tokens,
        token_ids=token_ids,
        samples=samples,
        block_tables=step.block_tables[rows],
        num_prompt_tokens=step.num_prompt_tokens[rows],
        seeds=step.seeds[rows],
        sampling_params=step.sampling_params.take(rows),
        histories=[step.histories[row] for row in rows.tolist()],
        adapters=[step.adapters[row] for row in rows.tolist()] if step.adapters else (),
        cross=None if step.cross is None else _encoded(step.cross, rows),
        awaited=None,
        grammars=None if step.grammars is None else step.grammars.take(rows),
        num_run_on_tokens=None,
        follows=None,
        drafts=None,
    )


def _encoded(cross: CrossInput, rows: Int64Array) -> CrossInput:
    """What `rows` have of an encoder whose tokens are encoded."""
    return CrossInput(
        cross.num_encoder_tokens[rows], cross.block_tables[rows], [_NO_TOKENS] * len(rows)
    )


def join_columns(parts: Sequence[LogprobColumns], kept_rows: BoolArray) -> LogprobColumns | None:
    """The scores of all `parts` in one, ordered; None if none is left.

    `kept_rows`: [R], those whose scores stay.
    """
    if not parts:
        return None
    row_indexes, positions = _joined(parts, "row_indexes"), _joined(parts, "positions")
    order = np.lexsort((positions, row_indexes))
    order = order[kept_rows[row_indexes[order]]]
    if not len(order):
        return None
    counts = np.concatenate([np.diff(part.top_offsets) for part in parts])
    starts = np.cumsum(counts) - counts
    top_offsets = np.concatenate([[0], np.cumsum(counts[order])])
    top_order = np.repeat(starts[order] - top_offsets[:-1], counts[order])
    top_order += np.arange(len(top_order))
    return LogprobColumns(
        row_indexes=row_indexes[order],
        positions=positions[order],
        token_ids=_joined(parts, "token_ids")[order],
        logprobs=_joined(parts, "logprobs")[order],
        ranks=_joined(parts, "ranks")[order],
        top_offsets=top_offsets.astype(np.int32),
        top_token_ids=_joined(parts, "top_token_ids")[top_order],
        top_logprobs=_joined(parts, "top_logprobs")[top_order],
    )


def _joined(parts: Sequence[LogprobColumns], column: str) -> npt.NDArray[Any]:
    return np.concatenate([getattr(part, column) for part in parts])
