"""Rows of a step as the tensors of one forward pass.

Rows with one input token come first, whatever their place in the step: attention computes them in
another way than those with several.

Shape letters: R rows of the pass, T input tokens over all of them, S rows that sample, P scored
prompt tokens, A rows whose input token is awaited, M blocks of the longest block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device.resident_tables import ResidentRows, SampledTokens
from executor_service.device.streams import streams_of
from executor_service.device.uploads import Numbers, Uploads
from executor_service.steps.step import BoolArray, Int32Array, Int64Array, StepInput
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import (
    PagedBatch,
    RowLayout,
    lay_out_decodes,
    lay_out_rows,
)

# How the rows of a pass that sample are drawn; None if more than their logits decides.
PlainDraws = Callable[[], DrawRows | None]


@dataclass(frozen=True, slots=True)
class Readout:
    """Whose logits a forward pass returns: first the rows that sample, then prompt tokens.

    Rows are indexes into the step, rising. `sampling_rows`: [S] int64. `prompt_rows`: [P] int64,
    and `prompt_positions`: [P] int64, the position of the token that is scored (the logits come
    from the position before it).
    """

    sampling_rows: Int64Array
    prompt_rows: Int64Array
    prompt_positions: Int64Array


@dataclass(frozen=True, slots=True)
class AwaitedInputs:
    """Input tokens that only the device knows.

    `places`: [A] int64, which input tokens these are. `tokens`: some, on the device, int64, of
    which those at `indexes` [A] int64 are meant.
    """

    places: Int64Array
    tokens: Tensor
    indexes: Int64Array


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of a pass on the host, laid end to end.

    `token_ids`: [T] int64; those that are awaited mean nothing. `num_computed_tokens`: [R] int64.
    `block_tables`: [R, M] int32. `logits_index`: [S + P] int64. `resident`: where the device has
    the block tables, None if it does not.
    """

    token_ids: Int64Array
    num_computed_tokens: Int64Array
    block_tables: Int32Array
    layout: RowLayout
    logits_index: Int64Array
    awaited: AwaitedInputs | None = None
    resident: ResidentRows | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.num_computed_tokens)

    @property
    def is_decode(self) -> bool:
        """Whether each row has one input token."""
        return self.layout.num_decodes == self.num_rows


@dataclass(frozen=True, slots=True)
class PassTensors:
    """What a model is given. `input_ids`, `position_ids`: [1, T] int64.

    `logits_index`: [S + P] int64, from which input tokens logits are wanted.
    """

    input_ids: Tensor
    position_ids: Tensor
    paged: PagedBatch
    logits_index: Tensor


class InputBatch:
    """One forward pass. Its tensors are made when one of them is first asked for.

    A model that can draw, and gets something from `draws`, leaves in `token_ids` [S] int32 what the
    rows sample, -1 for nothing. The next pass may overwrite them.
    """

    def __init__(
        self,
        readout: Readout,
        rows: PassRows,
        uploads: Uploads,
        tensors: PassTensors | None = None,
    ) -> None:
        """`readout` says whose the logits of `rows` are; `uploads` bring these to the device.

        `tensors`: None if these are yet to be made.
        """
        self.readout = readout
        self.rows = rows
        self.uploads = uploads
        self.draws: PlainDraws = lambda: None
        self.token_ids: Tensor | None = None
        self._tensors = tensors

    @property
    def tensors(self) -> PassTensors:
        """On the device."""
        if self._tensors is None:
            self._tensors = send_rows(self.rows, self.uploads)
        return self._tensors

    @property
    def input_ids(self) -> Tensor:
        """[1, T] int64."""
        return self.tensors.input_ids

    @property
    def position_ids(self) -> Tensor:
        """[1, T] int64."""
        return self.tensors.position_ids

    @property
    def paged(self) -> PagedBatch:
        """What attention is given."""
        return self.tensors.paged

    @property
    def logits_index(self) -> Tensor:
        """[S + P] int64: from which input tokens the logits of `readout` come."""
        return self.tensors.logits_index


def build_input_batch(
    step: StepInput,
    rows: Sequence[int] | Int64Array,
    block_size: int,
    device: torch.device,
    sampled: SampledTokens | None = None,
    uploads: Uploads | None = None,
    tables: Tensor | None = None,
    max_joined: int = 0,
) -> InputBatch:
    """The forward pass that computes `rows` (indexes into the rows of `step`, rising).

    `sampled` has the tokens that the step awaits; None if there are none. `uploads`: to `device`,
    for who builds many; None for some of its own. `tables`: those of all row ids, on the device, as
    in `ResidentRows`; None for those of the step. `max_joined`: how many rows of the pass may be
    rows of the step and what follows them; where it would be more, none is.
    """
    selected = np.asarray(rows, dtype=np.int64)
    readout, pass_rows = lay_out(step, selected, block_size, sampled, tables, max_joined)
    return InputBatch(readout, pass_rows, uploads or Uploads(device, streams_of(device)))


def lay_out(
    step: StepInput,
    selected: Int64Array,
    block_size: int,
    sampled: SampledTokens | None,
    resident_tables: Tensor | None = None,
    max_joined: int = 0,
) -> tuple[Readout, PassRows]:
    """The rows `selected` of `step`, see `build_input_batch`, and whose their logits are."""
    new_of_line = step.num_new_tokens[selected].astype(np.int64)
    # A line is a row of the step; rows of the pass begin with some of them.
    first_lines = _first_lines(step, selected, max_joined)
    is_joined = len(first_lines) < len(selected)
    if not is_joined and len(selected) == step.num_rows == len(step.token_ids):
        scores_prompt = step.sampling_params.num_prompt_logprobs >= 0
        if not np.count_nonzero(scores_prompt):
            return _lay_out_decodes(step, selected, block_size, sampled, resident_tables)
    new = np.add.reduceat(new_of_line, first_lines) if is_joined else new_of_line
    # How they are laid out, and where of that the rows are as the step has them.
    order = np.argsort(new > 1, kind="stable")
    computed = step.num_computed_tokens[selected[first_lines]].astype(np.int64)
    rows_in_order = selected[first_lines][order]
    tables = step.block_tables
    # Nobody reads all of them then, and they may be many.
    if resident_tables is None or not np.array_equal(rows_in_order, np.arange(step.num_rows)):
        tables = tables[rows_in_order]
    layout = lay_out_rows(tables, computed[order], new[order], block_size)
    starts = np.empty_like(new)
    starts[order] = layout.query_starts[:-1]
    ends = np.cumsum(new)
    row_of_token = np.repeat(np.arange(len(new)), new)
    line_of_token = np.repeat(np.arange(len(selected)), new_of_line)
    # Of each token, in the order of the step.
    places = np.arange(len(row_of_token)) + (starts - ends + new)[row_of_token]
    positions = layout.positions[places]

    samples = step.samples[selected]
    is_scored = _scores_prompt(step, selected)[line_of_token]
    is_scored &= positions + 1 < step.num_prompt_tokens[selected][line_of_token]
    scored = np.flatnonzero(is_scored)
    token_ids = np.empty(len(places), np.int64)
    token_ids[places] = _input_tokens(step, selected)
    readout = Readout(
        sampling_rows=selected[samples],
        prompt_rows=selected[line_of_token[scored]],
        prompt_positions=positions[scored] + 1,
    )
    ends_of_lines = np.cumsum(new_of_line)
    logits_index = np.concatenate([places[ends_of_lines - 1][samples], places[scored]])
    awaited = _awaited(step, selected, places[ends_of_lines - new_of_line], sampled)
    resident = None
    if resident_tables is not None:
        resident = ResidentRows(resident_tables, step.row_ids[rows_in_order].astype(np.int64))
    rows = PassRows(token_ids, computed[order], tables, layout, logits_index, awaited, resident)
    return readout, rows


def _first_lines(step: StepInput, selected: Int64Array, max_joined: int) -> Int64Array:
    """Finds the `selected` rows of `step` with which rows of a pass begin."""
    every = np.arange(len(selected))
    if step.follows is None or max_joined == 0:
        return every
    is_first = ~step.follows[selected]
    is_first[1:] |= np.diff(selected) != 1
    is_first[0] = True
    first_lines = np.flatnonzero(is_first)
    new = np.add.reduceat(step.num_new_tokens[selected], first_lines)
    return first_lines if np.count_nonzero(new > 1) <= max_joined else every


def _lay_out_decodes(
    step: StepInput,
    selected: Int64Array,
    block_size: int,
    sampled: SampledTokens | None,
    resident_tables: Tensor | None,
) -> tuple[Readout, PassRows]:
    """The same of a whole step with one input token a row, which is what most of them are."""
    computed, tables = step.num_computed_tokens.astype(np.int64), step.block_tables
    resident = None
    if resident_tables is None:
        tables = np.ascontiguousarray(tables)
    else:
        resident = ResidentRows(resident_tables, step.row_ids.astype(np.int64))
    sampling_rows, none = selected[step.samples], np.empty(0, np.int64)
    rows = PassRows(
        token_ids=step.token_ids.astype(np.int64),
        num_computed_tokens=computed,
        block_tables=tables,
        layout=lay_out_decodes(tables, computed, block_size),
        logits_index=sampling_rows,
        awaited=_awaited(step, selected, selected, sampled),
        resident=resident,
    )
    return Readout(sampling_rows, none, none), rows


def send_rows(rows: PassRows, uploads: Uploads) -> PassTensors:
    """`rows` in memory of their own, in one copy."""
    layout, awaited, resident = rows.layout, rows.awaited, rows.resident
    longs = [rows.token_ids[None], layout.positions[None], layout.slots, rows.logits_index]
    if awaited is not None:
        longs += [awaited.places, awaited.indexes]
    ints = [rows.num_computed_tokens.astype(np.int32), layout.query_starts.astype(np.int32)]
    if resident is None:
        ints.append(rows.block_tables)
    else:
        longs.append(resident.row_ids)
    (input_ids, position_ids, slots, index, *others), (computed, query_starts, *tables_sent) = (
        uploads.send(Numbers(longs, ints))
    )
    if resident is None:
        (tables,) = tables_sent
    else:
        width = min(rows.block_tables.shape[1], resident.tables.shape[1])
        tables = resident.gather(others.pop(), width)
    if awaited is not None:
        fill_in(input_ids[0], awaited, *others)
    paged = PagedBatch(
        block_tables=tables,
        num_computed_tokens=computed,
        query_starts=query_starts,
        slot_mapping=slots,
        max_num_new_tokens=layout.max_num_new_tokens,
        max_num_tokens=layout.max_num_tokens,
        num_decodes=layout.num_decodes,
    )
    return PassTensors(input_ids, position_ids, paged, index)


def fill_in(input_ids: Tensor, awaited: AwaitedInputs, places: Tensor, indexes: Tensor) -> None:
    """Puts what is awaited into `input_ids` [T]. `places`, `indexes`: its own, on the device."""
    input_ids.index_copy_(0, places, awaited.tokens.index_select(0, indexes))


def _awaited(
    step: StepInput, selected: Int64Array, starts: Int64Array, sampled: SampledTokens | None
) -> AwaitedInputs | None:
    """`starts`: [R], where the tokens of the selected rows are laid out."""
    awaited = step.awaited
    if awaited is None:
        return None
    is_selected = np.isin(awaited.rows, selected)
    if not is_selected.any():
        return None
    assert sampled is not None, "there is something to take what is awaited from"
    rows = awaited.rows[is_selected]
    tokens, indexes = sampled.find(awaited.step_ids[is_selected], step.row_ids[rows])
    # Each of these rows has one input token.
    return AwaitedInputs(starts[np.searchsorted(selected, rows)], tokens, indexes)


def _input_tokens(step: StepInput, selected: Int64Array) -> Int32Array:
    """The input tokens of the selected rows, [T]."""
    if len(selected) == step.num_rows:
        return step.token_ids
    ends = np.cumsum(step.num_new_tokens, dtype=np.int64)
    parts = [step.token_ids[ends[r] - step.num_new_tokens[r] : ends[r]] for r in selected]
    return np.concatenate(parts)


def _scores_prompt(step: StepInput, selected: Int64Array) -> BoolArray:
    scores: BoolArray = step.sampling_params.num_prompt_logprobs[selected] >= 0
    return scores
