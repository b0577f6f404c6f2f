"""A step as it arrives and as it is answered: columns and answers, no protobuf.

The words are those of `executor.proto`. Columns are numpy arrays that may be read-only: they lie in
the bytes of the message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from executor_service.errors import ExecutorError
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import BlockMoves, Int32Array, Int64Array, StepOutput, UInt8Array

# What leaves the process about a bug: its details might quote a prompt.
INTERNAL_ERROR_MESSAGE = "internal error; the executor's log has the details"


class StepStatus(IntEnum):
    """What became of a batch; the numbers are those of the contract."""

    OK = 1
    NEED_SNAPSHOT = 2
    REFUSED = 3
    FAILED = 4


class StepErrorReason(IntEnum):
    """Why a step was refused or failed; the numbers are those of the contract."""

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
    """A batch breaks the contract; nothing was changed."""

    def __init__(self, reason: StepErrorReason, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.error = StepError(reason, field, message)


@dataclass(frozen=True, slots=True)
class StepIdentity:
    """Which step of whom a batch is. `base_step_id` None: a snapshot."""

    scheduler_epoch: int
    executor_epoch: int
    step_id: int
    base_step_id: int | None


_NO_INDEXES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewCross:
    """Encoder tokens of rows to add, and the blocks they are in; see `NewRows` in the proto.

    Columns that are empty in the message are filled in here.
    """

    block_offsets: Int32Array
    block_ids: Int32Array
    encoder_offsets: Int32Array
    encoder_token_ids: Int32Array
    num_encoder_tokens: Int32Array


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows to add. Offsets have one element more than rows; see `NewRows` in the proto.

    `adapter_indexes`: empty for all -1. `cross`: None if no row has any of it.
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
        """The adapter of each row, empty for none. Trusts the indexes."""
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

    `sampled_steps_back`, `samples`: empty for all 0 and all 1. `num_run_on_tokens`: empty for all
    0; `draft_offsets`: empty for no drafts.
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

    @property
    def has_several(self) -> bool:
        """Whether some row may get more than one token."""
        return bool(len(self.num_run_on_tokens) or len(self.draft_token_ids))


@dataclass(frozen=True, slots=True)
class BatchContent:
    """What a batch asks for. Columns are whole; nothing else is checked yet."""

    removed_row_ids: Int32Array
    new_rows: NewRows | None
    table_writes: TableWrites | None
    swap_out: BlockMoves
    swap_in: BlockMoves
    copy: BlockMoves
    work: Work


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. `content` is why it cannot be read where its columns are no columns."""

    identity: StepIdentity
    content: BatchContent | BatchRefused


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer to a batch.

    `output`: of all rows, parallel to `Work.row_ids`; set exactly if `status` is OK. `queue_us`:
    how long the batch waited to begin.
    """

    scheduler_epoch: int
    executor_epoch: int
    step_id: int
    status: StepStatus
    error: StepError | None = None
    output: StepOutput | None = None
    queue_us: int = 0
