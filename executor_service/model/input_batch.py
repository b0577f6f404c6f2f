"""Rows of a step as the tensors of one forward pass.

Shape letters: R rows of the pass, T input tokens over all of them, S rows that sample, P scored
prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device.host_copies import to_device
from executor_service.device.sampled_tokens import SampledTokens
from executor_service.steps.step import BoolArray, Int64Array, StepInput
from splitserve_kernels.paged_batch import PagedBatch, build_paged_batch


@dataclass(frozen=True, slots=True)
class Readout:
    """Whose logits a forward pass returns: first the rows that sample, then prompt tokens.

    Rows are indexes into the step. `sampling_rows`: [S] int64. `prompt_rows`: [P] int64, and
    `prompt_positions`: [P] int64, the position of the token that is scored (the logits come from
    the position before it).
    """

    sampling_rows: Int64Array
    prompt_rows: Int64Array
    prompt_positions: Int64Array


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One forward pass. `input_ids`, `position_ids`: [1, T] int64. `logits_index`: [S + P] int64.

    `logits_index` says from which input tokens the logits of `readout` come.
    """

    input_ids: Tensor
    position_ids: Tensor
    paged: PagedBatch
    logits_index: Tensor
    readout: Readout


def build_input_batch(
    step: StepInput,
    rows: Sequence[int] | Int64Array,
    block_size: int,
    device: torch.device,
    sampled: SampledTokens | None = None,
) -> InputBatch:
    """The forward pass that computes `rows` (indexes into the rows of `step`, rising).

    `sampled` has the tokens that the step awaits; None if there are none.
    """
    selected = np.asarray(rows, dtype=np.int64)
    computed = step.num_computed_tokens[selected].astype(np.int64)
    new = step.num_new_tokens[selected].astype(np.int64)
    ends = np.cumsum(new)
    starts = ends - new
    row_of_token = np.repeat(np.arange(len(selected)), new)
    positions = np.arange(len(row_of_token)) + (computed - starts)[row_of_token]

    samples = step.samples[selected]
    is_scored = _scores_prompt(step, selected)[row_of_token]
    is_scored &= positions + 1 < step.num_prompt_tokens[selected][row_of_token]
    scored = np.flatnonzero(is_scored)
    return InputBatch(
        input_ids=_input_ids(step, selected, ends, device, sampled),
        position_ids=to_device(positions[None], device),
        paged=build_paged_batch(
            torch.from_numpy(step.block_tables[selected]),
            torch.from_numpy(computed),
            torch.from_numpy(new),
            block_size,
            device,
        ),
        logits_index=to_device(np.concatenate([ends[samples] - 1, scored]), device),
        readout=Readout(
            sampling_rows=selected[samples],
            prompt_rows=selected[row_of_token[scored]],
            prompt_positions=positions[scored] + 1,
        ),
    )


def _input_ids(
    step: StepInput,
    selected: Int64Array,
    ends: Int64Array,
    device: torch.device,
    sampled: SampledTokens | None,
) -> Tensor:
    """The input tokens of the selected rows, which end at `ends`: [1, T] int64, on `device`."""
    awaited = step.awaited
    if awaited is None or not np.isin(awaited.rows, selected).any():
        # Numpy adds an axis in a tenth of the time.
        return to_device(_input_tokens(step, selected)[None], device)
    assert sampled is not None, "there is something to take what is awaited from"
    is_selected = np.isin(awaited.rows, selected)
    rows = awaited.rows[is_selected]
    token_ids = sampled.take(awaited.step_ids[is_selected], step.row_ids[rows])
    if len(rows) == len(selected):
        return token_ids[None]
    input_ids = to_device(_input_tokens(step, selected), device)
    places = ends[np.searchsorted(selected, rows)] - 1
    input_ids[to_device(places, device)] = token_ids
    return input_ids[None]


def _input_tokens(step: StepInput, selected: Int64Array) -> Int64Array:
    """The input tokens of the selected rows, [T] int64."""
    if len(selected) == step.num_rows:
        return step.token_ids.astype(np.int64)
    ends = np.cumsum(step.num_new_tokens, dtype=np.int64)
    parts = [step.token_ids[ends[r] - step.num_new_tokens[r] : ends[r]] for r in selected]
    return np.concatenate(parts).astype(np.int64)


def _scores_prompt(step: StepInput, selected: Int64Array) -> BoolArray:
    scores: BoolArray = step.sampling_params.num_prompt_logprobs[selected] >= 0
    return scores
