"""Data classes of a batch and of its answer: numpy columns and plain values, no protobuf.

The names are those of `executor.proto`. Columns are numpy arrays that may be read-only, because
they are views of the bytes of the message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from executor_service.errors import ExecutorError
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import (
    BlockMoves,
    EncoderInput,
    Float32Array,
    Int32Array,
    Int64Array,
    StepOutput,
    UInt8Array,
)

# Error message for internal errors. The details stay in the log: they might quote a prompt.
INTERNAL_ERROR_MESSAGE = "internal error; the executor's log has the details"


class StepStatus(IntEnum):
    """Outcome of a batch; the numbers are those of the contract."""

    OK = 1
    NEED_SNAPSHOT = 2
    REFUSED = 3
    FAILED = 4


class StepErrorReason(IntEnum):
    """Reason why a step was refused or failed; the numbers are those of the contract."""

    STALE_SCHEDULER_EPOCH = 1
    WRONG_EXECUTOR_EPOCH = 2
    STALE_STEP = 3
    MALFORMED = 4
    BLOCK_OUT_OF_RANGE = 5
    BLOCK_OVERLAP = 6
    ROW_UNKNOWN = 7
    ROW_EXISTS = 8
    POSITION_OUT_OF_RANGE = 9
    TOKEN_OUT_OF_RANGE = 10
    LIMIT_EXCEEDED = 11
    FEATURE_UNSUPPORTED = 12
    OUT_OF_MEMORY = 13
    INTERNAL = 14
    FUTURE_SCHEDULER_EPOCH = 15


@dataclass(frozen=True, slots=True)
class StepError:
    """Details of REFUSED and FAILED. `field`: a path such as `work.row_ids`, empty if none."""

    reason: StepErrorReason
    field: str
    message: str


class BatchRefused(ExecutorError):
    """Error: the batch breaks the contract. Nothing was changed."""

    def __init__(self, reason: StepErrorReason, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.error = StepError(reason, field, message)


@dataclass(frozen=True, slots=True)
class StepIdentity:
    """Identity of a batch: its sender, its receiver and its step.

    `base_step_id`: the step that a delta builds on; None for a snapshot.
    """

    scheduler_epoch: int
    executor_epoch: int
    step_id: int
    base_step_id: int | None


_NO_INDEXES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewCross:
    """Encoder inputs of new rows and the blocks that hold their KV; see `NewRows` in the proto.

    Columns that the message leaves empty are filled in here. `features`: float32 features of audio.
    """

    block_offsets: Int32Array
    block_ids: Int32Array
    encoder_offsets: Int32Array
    encoder_token_ids: Int32Array
    num_encoder_tokens: Int32Array
    feature_offsets: Int32Array
    features: Float32Array

    def encoder_input(self, row: int) -> EncoderInput:
        """Returns what is encoded for a row, empty for nothing."""
        start, end = self.feature_offsets[row : row + 2]
        if end > start:
            return self.features[start:end]
        start, end = self.encoder_offsets[row : row + 2]
        return self.encoder_token_ids[start:end]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows to add; see `NewRows` in the proto. Offsets have one element more than there are rows.

    `adapter_indexes`: empty stands for all -1. `cross`: None if no row has encoder tokens.
    """

    row_ids: Int32Array
    sampling_params_indexes: Int32Array
    seeds: Int64Array
    num_prompt_tokens: Int32Array
    block_offsets: Int32Array
    block_ids: Int32Array
    history_offsets: Int32Array
    history_token_ids: Int32Array
    sampling_params: tuple[SamplingParams, ...]
    adapter_indexes: Int32Array = field(default_factory=lambda: _NO_INDEXES)
    adapters: tuple[str, ...] = ()
    cross: NewCross | None = None

    @property
    def row_adapters(self) -> list[str]:
        """Adapter name of each row, empty for none. Does not check the indexes."""
        if not len(self.adapter_indexes):
            return [""] * len(self.row_ids)
        return [self.adapters[i] if i >= 0 else "" for i in self.adapter_indexes.tolist()]


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Changes to block tables; see `TableWrites` in the proto."""

    row_ids: Int32Array
    start_indexes: Int32Array
    block_offsets: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class Work:
    """Rows to compute; see `Work` in the proto.

    `sampled_steps_back`, `num_run_on_tokens`: empty stands for all 0. `samples`: empty stands for
    all 1. `draft_offsets`: empty stands for no draft tokens. `reports_parts`: whether tokens of
    rows that run on are reported before the step is done.
    """

    row_ids: Int32Array
    num_computed_tokens: Int32Array
    num_new_tokens: Int32Array
    sampled_steps_back: Int32Array
    token_ids: Int32Array
    samples: UInt8Array
    num_run_on_tokens: Int32Array = field(default_factory=lambda: _NO_INDEXES)
    draft_offsets: Int32Array = field(default_factory=lambda: _NO_INDEXES)
    draft_token_ids: Int32Array = field(default_factory=lambda: _NO_INDEXES)
    reports_parts: bool = False

    @property
    def has_several(self) -> bool:
        """Whether any row may run on or has draft tokens, and so may get several tokens."""
        return bool(len(self.num_run_on_tokens) or len(self.draft_token_ids))


@dataclass(frozen=True, slots=True)
class BatchContent:
    """Content of a batch. Columns are decoded completely; their values are not checked yet."""

    removed_row_ids: Int32Array
    new_rows: NewRows | None
    table_writes: TableWrites | None
    swap_out: BlockMoves
    swap_in: BlockMoves
    copy: BlockMoves
    work: Work


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of one step. `content`: the refusal if its columns cannot be decoded."""

    identity: StepIdentity
    content: BatchContent | BatchRefused


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """Answer to a batch.

    `output`: results of all rows, parallel to `Work.row_ids`; set exactly if `status` is OK.
    `queue_us`: time that the batch waited before its step began.
    """

    scheduler_epoch: int
    executor_epoch: int
    step_id: int
    status: StepStatus
    error: StepError | None = None
    output: StepOutput | None = None
    queue_us: int = 0
