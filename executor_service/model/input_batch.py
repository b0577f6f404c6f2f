"""Input of one forward pass: rows of a step laid end to end, and their tensors.

Rows with one input token come first, whatever their place in the step: attention computes them in
another way than rows with several.

Shape letters: R rows of the pass, T input tokens of all rows, S rows that sample, P scored prompt
tokens, A rows whose input token is awaited, M blocks of the longest block table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device import IntegerArrays, ResidentRows, SampledTokens, Uploads, streams_of
from executor_service.model.adapter import AdaptedTokens, Adapter
from executor_service.steps import BoolArray, Int32Array, Int64Array, StepInput
from splitserve_kernels.adapter_tiles import TokenTiles
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import (
    PagedBatch,
    RowLayout,
    build_paged_batch,
    lay_out_decodes,
    lay_out_rows,
)

# Returns how the sampling rows of a pass are drawn; None if more than their logits decides.
PlainDraws = Callable[[], DrawRows | None]


@dataclass(frozen=True, slots=True)
class Readout:
    """Rows and prompt tokens whose logits a forward pass returns, rows that sample first.

    Rows are rising indexes into the step. `sampling_rows`: [S] int64. `prompt_rows`: [P] int64.
    `prompt_positions`: [P] int64, the position of the scored token (its logits come from the
    position before).
    """

    sampling_rows: Int64Array
    prompt_rows: Int64Array
    prompt_positions: Int64Array


@dataclass(frozen=True, slots=True)
class AwaitedInputs:
    """Input tokens that only the device knows.

    `input_indexes`: [A] int64, indexes of these input tokens. `tokens`: int64 on the device, of
    which the elements at `indexes` [A] int64 are the tokens.
    """

    input_indexes: Int64Array
    tokens: Tensor
    indexes: Int64Array


@dataclass(frozen=True, slots=True)
class CrossTokens:
    """Encoder tokens to which the input tokens attend.

    `block_tables`: [T, X] int32, their blocks. `num_encoder_tokens`: [T] int32, at least 1.
    """

    block_tables: Int32Array
    num_encoder_tokens: Int32Array

    def batch(self, block_size: int, device: torch.device) -> PagedBatch:
        """Returns the batch of cross attention, for which each input token is a row.

        Such a row is the last of its encoder's tokens, so that it sees them all.
        """
        num_tokens = torch.from_numpy(self.num_encoder_tokens)
        tables, new = torch.from_numpy(self.block_tables), torch.ones_like(num_tokens)
        return build_paged_batch(tables, num_tokens - 1, new, block_size, device)


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of a pass on the host, laid end to end.

    `token_ids`: [T] int64, arbitrary where awaited. `num_computed_tokens`: [R] int64.
    `block_tables`: [R, M] int32. `logits_index`: [S + P] int64. `resident`: the block tables that
    the device keeps; None if it keeps none. `adapted`: None if no row has an adapter. `cross`: None
    without an encoder.
    """

    token_ids: Int64Array
    num_computed_tokens: Int64Array
    block_tables: Int32Array
    layout: RowLayout
    logits_index: Int64Array
    awaited: AwaitedInputs | None = None
    resident: ResidentRows | None = None
    adapted: AdaptedTokens | None = None
    cross: CrossTokens | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.num_computed_tokens)

    @property
    def is_decode(self) -> bool:
        """Whether each row has one input token."""
        return self.layout.num_decodes == self.num_rows


@dataclass(frozen=True, slots=True)
class PassTiles:
    """Tiles of tokens that have an adapter. `tokens`: input tokens. `lines`: rows of logits."""

    tokens: TokenTiles
    lines: TokenTiles


@dataclass(frozen=True, slots=True)
class PassTensors:
    """Tensors that a model gets. `input_ids`, `position_ids`: [1, T] int64.

    `logits_index`: [S + P] int64, indexes of the input tokens whose logits are wanted. `tiles`: of
    a recording whose tokens may have adapters; None otherwise.
    """

    input_ids: Tensor
    position_ids: Tensor
    paged: PagedBatch
    logits_index: Tensor
    tiles: PassTiles | None = None


class InputBatch:
    """Inputs of a forward pass. Tensors are created at first use.

    A model that can draw, and for which `draws` returns draws, writes the sampled tokens to
    `token_ids`, [S] int32, -1 for none. The next pass may overwrite them.
    """

    def __init__(
        self,
        readout: Readout,
        rows: PassRows,
        uploads: Uploads,
        tensors: PassTensors | None = None,
    ) -> None:
        """Describes the pass of `rows`, whose logits belong to `readout`.

        `uploads`: to the device. `tensors`: None to create them at their first use.
        """
        self.readout = readout
        self.rows = rows
        self.uploads = uploads
        self.draws: PlainDraws = lambda: None
        self.token_ids: Tensor | None = None
        self._tensors = tensors

    @property
    def tensors(self) -> PassTensors:
        """Tensors of the pass on the device."""
        if self._tensors is None:
            self._tensors = send_rows(self.rows, self.uploads)
        return self._tensors

    @property
    def input_ids(self) -> Tensor:
        """Input tokens, [1, T] int64."""
        return self.tensors.input_ids

    @property
    def position_ids(self) -> Tensor:
        """Positions of the input tokens, [1, T] int64."""
        return self.tensors.position_ids

    @property
    def paged(self) -> PagedBatch:
        """Batch description for attention."""
        return self.tensors.paged

    @property
    def logits_index(self) -> Tensor:
        """[S + P] int64: indexes of the input tokens from which the logits of `readout` come."""
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
    adapters: Mapping[str, Adapter] | None = None,
) -> InputBatch:
    """Builds the forward pass that computes `rows`, rising indexes into the rows of `step`.

    `sampled`: tokens that the step awaits; None if it awaits none. `uploads`: uploads to `device`;
    None for new ones. `tables`: block tables of all row ids on the device, as in `ResidentRows`;
    None for those of the step. `max_joined`: rows of the step that follow each other are joined to
    one row of the pass if at most this many rows of the pass then have several tokens. `adapters`:
    those of the rows, by name; None if no row has any.
    """
    selected = np.asarray(rows, dtype=np.int64)
    readout, pass_rows = lay_out(step, selected, block_size, sampled, tables, max_joined, adapters)
    return InputBatch(readout, pass_rows, uploads or Uploads(device, streams_of(device)))


def lay_out(
    step: StepInput,
    selected: Int64Array,
    block_size: int,
    sampled: SampledTokens | None,
    resident_tables: Tensor | None = None,
    max_joined: int = 0,
    adapters: Mapping[str, Adapter] | None = None,
) -> tuple[Readout, PassRows]:
    """Lays out the rows `selected` of `step`, and returns their readout.

    The arguments are those of `build_input_batch`.
    """
    new_of_line = step.num_new_tokens[selected].astype(np.int64)
    # A line is a row of the step; a row of the pass is one line, or several joined lines.
    first_lines = _first_lines(step, selected, max_joined)
    is_joined = len(first_lines) < len(selected)
    if not is_joined and len(selected) == step.num_rows == len(step.token_ids):
        scores_prompt = step.sampling_params.num_prompt_logprobs >= 0
        if not np.count_nonzero(scores_prompt):
            return _lay_out_decodes(step, selected, block_size, sampled, resident_tables, adapters)
    new = np.add.reduceat(new_of_line, first_lines) if is_joined else new_of_line
    # Order of the rows in the pass, and their computed tokens.
    order = np.argsort(new > 1, kind="stable")
    computed = step.num_computed_tokens[selected[first_lines]].astype(np.int64)
    rows_in_order = selected[first_lines][order]
    tables = step.block_tables
    # With resident tables, and rows in the step's order, no copy of the large array is needed.
    if resident_tables is None or not np.array_equal(rows_in_order, np.arange(step.num_rows)):
        tables = tables[rows_in_order]
    layout = lay_out_rows(tables, computed[order], new[order], block_size)
    starts = np.empty_like(new)
    starts[order] = layout.query_starts[:-1]
    ends = np.cumsum(new)
    row_of_token = np.repeat(np.arange(len(new)), new)
    line_of_token = np.repeat(np.arange(len(selected)), new_of_line)
    # Index of each token in the pass, tokens in the order of the step.
    input_indexes = np.arange(len(row_of_token)) + (starts - ends + new)[row_of_token]
    positions = layout.positions[input_indexes]

    samples = step.samples[selected]
    is_scored = _scores_prompt(step, selected)[line_of_token]
    is_scored &= positions + 1 < step.num_prompt_tokens[selected][line_of_token]
    scored = np.flatnonzero(is_scored)
    token_ids = np.empty(len(input_indexes), np.int64)
    token_ids[input_indexes] = _input_tokens(step, selected)
    readout = Readout(
        sampling_rows=selected[samples],
        prompt_rows=selected[line_of_token[scored]],
        prompt_positions=positions[scored] + 1,
    )
    ends_of_lines = np.cumsum(new_of_line)
    logits_index = np.concatenate(
        [input_indexes[ends_of_lines - 1][samples], input_indexes[scored]]
    )
    awaited = _awaited(step, selected, input_indexes[ends_of_lines - new_of_line], sampled)
    resident = None
    if resident_tables is not None:
        resident = ResidentRows(resident_tables, step.row_ids[rows_in_order].astype(np.int64))
    rows = PassRows(
        token_ids,
        computed[order],
        tables,
        layout,
        logits_index,
        awaited,
        resident,
        _adapted(step, selected, line_of_token, input_indexes, adapters),
        _cross(step, selected, line_of_token, input_indexes),
    )
    return readout, rows


def _first_lines(step: StepInput, selected: Int64Array, max_joined: int) -> Int64Array:
    """Finds the `selected` rows of `step` with which rows of the pass begin."""
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
    adapters: Mapping[str, Adapter] | None,
) -> tuple[Readout, PassRows]:
    """Lays out a whole step with one input token a row, which most steps are."""
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
        adapted=_adapted(step, selected, selected, selected, adapters),
        cross=_cross(step, selected, selected, selected),
    )
    return Readout(sampling_rows, none, none), rows


def _adapted(
    step: StepInput,
    selected: Int64Array,
    line_of_token: Int64Array,
    input_indexes: Int64Array,
    adapters: Mapping[str, Adapter] | None,
) -> AdaptedTokens | None:
    """Returns which tokens of the `selected` rows of `step` have an adapter.

    `line_of_token`, `input_indexes`: [T], of each token in the order of the step, its row's index
    in `selected` and its own in the pass.
    """
    if not adapters or not step.adapters:
        return None
    names = [step.adapters[row] for row in selected.tolist()]
    indexes = {name: index for index, name in enumerate(dict.fromkeys(filter(None, names)))}
    if not indexes:
        return None
    of_line = np.array([indexes.get(name, -1) for name in names], np.int32)
    of_token = np.empty(len(input_indexes), np.int32)
    of_token[input_indexes] = of_line[line_of_token]
    return AdaptedTokens(tuple(map(adapters.__getitem__, indexes)), of_token)


def _cross(
    step: StepInput,
    selected: Int64Array,
    line_of_token: Int64Array,
    input_indexes: Int64Array,
) -> CrossTokens | None:
    """Returns the encoder tokens of each input token; the arguments are those of `_adapted`."""
    if step.cross is None:
        return None
    rows = np.empty_like(input_indexes)
    rows[input_indexes] = selected[line_of_token]
    return CrossTokens(step.cross.block_tables[rows], step.cross.num_encoder_tokens[rows])


def send_rows(rows: PassRows, uploads: Uploads) -> PassTensors:
    """Copies `rows` to new device memory, in one transfer."""
    layout, awaited, resident = rows.layout, rows.awaited, rows.resident
    longs = [rows.token_ids[None], layout.positions[None], layout.slots, rows.logits_index]
    if awaited is not None:
        longs += [awaited.input_indexes, awaited.indexes]
    ints = [rows.num_computed_tokens.astype(np.int32), layout.query_starts.astype(np.int32)]
    if resident is None:
        ints.append(rows.block_tables)
    else:
        longs.append(resident.row_ids)
    (input_ids, position_ids, slots, index, *others), (computed, query_starts, *tables_sent) = (
        uploads.send(IntegerArrays(longs, ints))
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


def fill_in(
    input_ids: Tensor, awaited: AwaitedInputs, input_indexes: Tensor, indexes: Tensor
) -> None:
    """Writes awaited tokens into `input_ids` [T].

    `input_indexes`, `indexes`: those of `awaited`, on the device.
    """
    input_ids.index_copy_(0, input_indexes, awaited.tokens.index_select(0, indexes))


def _awaited(
    step: StepInput, selected: Int64Array, starts: Int64Array, sampled: SampledTokens | None
) -> AwaitedInputs | None:
    """Returns the awaited tokens of selected rows.

    `starts`: [R], where rows are laid out in the pass.
    """
    awaited = step.awaited
    if awaited is None:
        return None
    is_selected = np.isin(awaited.rows, selected)
    if not is_selected.any():
        return None
    assert sampled is not None, "awaited tokens need sampled tokens"
    rows = awaited.rows[is_selected]
    tokens, indexes = sampled.find(awaited.step_ids[is_selected], step.row_ids[rows])
    # Each of these rows has one input token.
    return AwaitedInputs(starts[np.searchsorted(selected, rows)], tokens, indexes)


def _input_tokens(step: StepInput, selected: Int64Array) -> Int32Array:
    """Returns the input tokens of the selected rows, [T]."""
    if len(selected) == step.num_rows:
        return step.token_ids
    ends = np.cumsum(step.num_new_tokens, dtype=np.int64)
    parts = [step.token_ids[ends[r] - step.num_new_tokens[r] : ends[r]] for r in selected]
    return np.concatenate(parts)


def _scores_prompt(step: StepInput, selected: Int64Array) -> BoolArray:
    scores: BoolArray = step.sampling_params.num_prompt_logprobs[selected] >= 0
    return scores
