"""Recorded decodes replayed back to back, each fed the token that the one before it drew.

Between two decodes another recording writes the next inputs: token, position, length, slot from the
block table, and the position of the random number. The host gets all tokens at the end and decides
nothing in between. The second part builds the steps that recordings are tried with.

Shape letters: N rows of a shape, R rows that run on, m most tokens of such a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor_service.device import KVCache, Recorder, Uploads
from executor_service.errors import RecordingFailed, TrialFailed
from executor_service.model import AdaptedTokens, Adapter, PassRows, Readout
from executor_service.runner.static_inputs import StaticInputs, StepShape
from executor_service.sampling import StaticDraw
from executor_service.steps import BoolArray, Int32Array, Int64Array
from executor_service.trials import Trial
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import lay_out_rows

_log = logging.getLogger(__name__)

Replay = Callable[[], None]


class RecordedRuns:
    """Recordings that advance the inputs after a recorded decode, so that its rows run on."""

    def __init__(
        self, inputs: StaticInputs, static_draw: StaticDraw, drawn: Tensor, block_size: int
    ) -> None:
        """Starts without recordings. `inputs`: the memory that recordings read.

        `drawn`: [N] int32 or longer, into which recorded decodes write the tokens of `static_draw`.
        """
        self._inputs = inputs
        self._static_draw = static_draw
        self._drawn = drawn
        self._block_size = block_size
        # Tokens of the last pass; -1 for rows that are to get no more.
        self._taken = torch.full_like(drawn, -1)
        self._replays: dict[StepShape, Replay] = {}

    @property
    def is_recorded(self) -> bool:
        """Whether rows can run on."""
        return bool(self._replays)

    def record(
        self,
        shapes: Sequence[StepShape],
        recorder: Recorder,
        trial_rows: Callable[[StepShape], PassRows],
        uploads: Uploads,
    ) -> None:
        """Records the advance for decodes of `shapes`, and tries it.

        After a failure no row runs on, and an error in the log says why. `trial_rows`: returns the
        rows to try a shape with. Raises RecordingFailed if the process cannot go on.
        """
        try:
            for shape in shapes:
                # The memory still holds a step of another shape.
                self._inputs.fill(no_rows(), shape, uploads)
                self._replays[shape] = recorder.record(partial(self._advance, shape))
            for shape in shapes:
                self._try(shape, trial_rows(shape), uploads)
        except RecordingFailed:
            raise
        except Exception as error:  # whatever operators raise
            self._replays = {}
            if isinstance(error, TrialFailed):
                _log.error("cuda_graphs_refused kind=%s reason=%r", "run", str(error))
            else:
                name = type(error).__name__
                _log.exception("cuda_graphs_not_recorded kind=%s reason=%r", "run", name)

    def run(self, shape: StepShape, replay: Replay, num_rows: int, most: int) -> Tensor:
        """Returns the tokens, [R, m] int32, of the first rows of `shape`.

        `replay`: replays the decode of that shape. `most`: m; a row may get fewer, as `num_left` of
        its inputs says.
        """
        # All replays are launched before the first token is known, so nobody is asked between them
        # (`RunRows.after_token`): a run goes on to its end.
        tokens = self._drawn.new_empty(num_rows, most)
        for index in range(most):
            replay()
            self._replays[shape]()
            tokens[:, index].copy_(self._taken[:num_rows])
        return tokens

    def _advance(self, shape: StepShape) -> None:
        """Advances the inputs by one token; this is what is recorded.

        A row that gets no more tokens keeps its position and writes to no slot.
        """
        inputs, num_left = self._inputs.tensors(shape), self._inputs.num_left(shape)
        drawn, size = self._drawn[: shape.num_rows], self._block_size
        self._taken[: shape.num_rows].copy_(drawn.masked_fill(num_left <= 0, -1))
        num_left.sub_(1).clamp_(min=0)
        distance = num_left.clamp(max=1).to(torch.int64)
        positions = inputs.position_ids[0].add_(distance)
        inputs.paged.num_computed_tokens.add_(distance)
        blocks = inputs.paged.block_tables.gather(1, (positions // size)[:, None]).squeeze(1)
        slots = blocks.to(torch.int64) * size + positions % size
        inputs.paged.slot_mapping.copy_(slots.masked_fill(distance == 0, -1))
        # Where nothing was drawn, any token will do: the tokens after it are not used.
        inputs.input_ids[0].copy_(drawn.clamp(min=0))
        self._static_draw.advance(self._inputs.words(shape), distance)

    def _try(self, shape: StepShape, rows: PassRows, uploads: Uploads) -> None:
        """Raises TrialFailed if the recorded advance leaves wrong inputs for the next pass."""
        num_rows = rows.num_rows
        token_ids = np.arange(num_rows)
        draws = trial_draws(num_rows, num_rows)
        num_tokens = run_lengths(rows, self._block_size)
        goes_on = num_tokens > 1

        def filled_anew(rows: PassRows) -> dict[str, Tensor]:
            """Returns the inputs of a pass that begins one token later."""
            later = replace(draws, positions=draws.positions + goes_on)
            rows = rows_after(rows, token_ids, goes_on, self._block_size)
            self._inputs.fill(rows, shape, uploads, later, num_tokens - 1)
            return self._state(shape, num_rows)

        def advanced(rows: PassRows) -> dict[str, Tensor]:
            self._inputs.fill(rows, shape, uploads, draws, num_tokens)
            self._drawn[:num_rows].copy_(torch.from_numpy(token_ids))
            self._replays[shape]()
            return self._state(shape, num_rows)

        def differences(
            _rows: PassRows, expected: dict[str, Tensor], actual: dict[str, Tensor]
        ) -> float:
            for name, numbers in expected.items():
                if not torch.equal(actual[name], numbers):
                    raise TrialFailed(f"{name} of {num_rows} continued rows differ")
            if not torch.equal(self._taken[:num_rows], self._drawn[:num_rows]):
                raise TrialFailed(f"tokens of {num_rows} rows differ from the drawn tokens")
            return 0.0

        Trial(filled_anew, advanced, (rows,), differences).check()

    def _state(self, shape: StepShape, num_rows: int) -> dict[str, Tensor]:
        """Copies the inputs that a pass of `shape` would read for its first `num_rows` rows."""
        inputs = self._inputs.tensors(shape)
        read = {
            "tokens": inputs.input_ids[0, :num_rows],
            "positions": inputs.position_ids,
            "lengths": inputs.paged.num_computed_tokens,
            "slots": inputs.paged.slot_mapping,
            "draws": self._inputs.words(shape),
            "counts": self._inputs.num_left(shape),
        }
        return {name: numbers.clone() for name, numbers in read.items()}


# -- Steps to try recordings with ------------------------------------------------------------------
#
# A replay of such a step must give the same results as the model without recordings.


def trial_rows(shape: StepShape, cache: KVCache, max_model_len: int, vocab_size: int) -> PassRows:
    """Returns decodes, plus one prompt if the shape has prompts, with one token less than fits.

    There are as many rows as the pool has blocks for: each row has its own blocks, from block 0 on.
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


def with_adapters(rows: PassRows, adapters: tuple[Adapter, ...]) -> PassRows:
    """Returns `rows` with `adapters` and none in turn, token by token."""
    if not adapters:
        return rows
    of_token = np.arange(len(rows.token_ids), dtype=np.int32) % (len(adapters) + 1)
    of_token[of_token == len(adapters)] = -1
    return replace(rows, adapted=AdaptedTokens(adapters, of_token))


def run_lengths(rows: PassRows, block_size: int) -> Int32Array:
    """Returns how many tokens each decode of the trial may get.

    It is 2 if the row's block has room, otherwise 1.
    """
    room = block_size - 1 - rows.num_computed_tokens % block_size
    return np.minimum(room + 1, 2).astype(np.int32)


def rows_after(
    rows: PassRows, token_ids: Int64Array, goes_on: BoolArray, block_size: int
) -> PassRows:
    """Returns the decode of `rows` one token later, with the input tokens `token_ids` [R].

    A row that does not go on keeps its position and writes to no slot.
    """
    positions = rows.num_computed_tokens + goes_on
    blocks = rows.block_tables[np.arange(rows.num_rows), positions // block_size].astype(np.int64)
    slots = np.where(goes_on, blocks * block_size + positions % block_size, -1)
    layout = replace(rows.layout, positions=positions, slots=slots)
    return replace(rows, token_ids=token_ids, num_computed_tokens=positions, layout=layout)


def no_rows() -> PassRows:
    """Returns a pass without rows, so that recordings are made with padding alone.

    A model whose Python code decides by the rows would record that decision; the trial finds it.
    """
    nothing, tables = np.empty(0, np.int64), np.empty((0, 0), np.int32)
    layout = lay_out_rows(tables, nothing, nothing, 1)
    return PassRows(nothing, nothing, tables, layout, nothing)


def trial_draws(num_rows: int, vocab_size: int) -> DrawRows:
    """Returns draws of greedy rows, rows without a cut, and rows with top-k and top-p, in turn."""
    rows = np.arange(num_rows)
    is_cut = rows % 3 == 2
    return replace(
        DrawRows.greedy(num_rows, vocab_size),
        temperatures=(rows % 3 > 0).astype(np.float32),
        top_k=np.where(is_cut, min(20, vocab_size), vocab_size).astype(np.int32),
        top_p=np.where(is_cut, 0.9, 1.0),
        seeds=rows.astype(np.int64),
        positions=rows.astype(np.int64),
    )


def readout_of_lines(num_lines: int) -> Readout:
    """Returns a readout of `num_lines` rows that all sample."""
    no_rows = np.empty(0, dtype=np.int64)
    return Readout(np.arange(num_lines), no_rows, no_rows)
