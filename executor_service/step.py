"""One step as the compute side sees it: plain arrays, no protobuf, no torch.

Shape letters: R rows of the step, T input tokens over all rows, M blocks of the longest block
table in the step, X blocks of the longest cross table, K scored tokens, N alternatives over all
scored tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from executor_service.sampling_params import ParamRows

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


class RowStatus(IntEnum):
    """What became of one row; the numbers are those of the contract."""

    OK = 1
    INVALID_LOGITS = 2
    INPUT_UNAVAILABLE = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Block pairs of one phase: `sources[i]` is copied over `destinations[i]`, all reads first."""

    sources: Int32Array
    destinations: Int32Array


@dataclass(frozen=True, slots=True)
class CrossInput:
    """What the rows of a step attend to beside their own tokens: the output of an encoder.

    `num_encoder_tokens`: [R] int32, 0 for a row without. `block_tables`: [R, X] int32, the blocks
    of the encoder tokens, padded with -1. `encoder_token_ids`: R long; the tokens that are to be
    encoded into those blocks before any row attends, empty where they are there already.
    """

    num_encoder_tokens: Int32Array
    block_tables: Int32Array
    encoder_token_ids: Sequence[Int32Array]


@dataclass(frozen=True, slots=True)
class StepInput:
    """A validated step. Executed as swap_out, swap_in, copy, compute, sample.

    `row_ids`, `num_computed_tokens`, `num_new_tokens`, `num_prompt_tokens`: [R] int32.
    `token_ids`: [T] int32, rows concatenated; every token is literal here.
    `samples`: [R] bool. `seeds`: [R] int64.
    `block_tables`: [R, M] int32, padded with -1. Entries wholly behind the model's sliding window
    may be -1 too, or name a block that is no longer the row's.
    `sampling_params`, `histories`: R long. A history is all tokens of the sequence known so far
    (the input tokens included), or None where the params need none.
    `adapters`: R names, empty for a row without; or nothing at all if no row has one. `cross`: None
    if no row has encoder tokens.
    """

    step_id: int
    swap_out: BlockMoves
    swap_in: BlockMoves
    copy: BlockMoves
    row_ids: Int32Array
    num_computed_tokens: Int32Array
    num_new_tokens: Int32Array
    token_ids: Int32Array
    samples: BoolArray
    block_tables: Int32Array
    num_prompt_tokens: Int32Array
    seeds: Int64Array
    sampling_params: ParamRows
    histories: Sequence[Sequence[int] | None]
    adapters: Sequence[str] = ()
    cross: CrossInput | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_ids)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Scores of K tokens, ordered by row, then position; see `Logprobs` in `executor.proto`.

    `row_indexes`, `positions`, `token_ids`, `ranks`: [K] int32. `logprobs`: [K] float32.
    `top_offsets`: [K + 1] int32. `top_token_ids`: [N] int32. `top_logprobs`: [N] float32.
    """

    row_indexes: Int32Array
    positions: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    ranks: Int32Array
    top_offsets: Int32Array
    top_token_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner returns: `row_statuses` [R] uint8, `sampled_token_ids` [R] int32 (-1: none)."""

    row_statuses: UInt8Array
    sampled_token_ids: Int32Array
    row_errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    move_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


class Runner(Protocol):
    """Executes steps one after the other against its own KV pools."""

    def execute(self, step: StepInput) -> StepOutput:
        """Runs `step`; writes the KV pools. Raises StepFailed if no row can be answered."""
        ...
