"""What the core decides for one step, and what it learns from its result."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from scheduler_service.core.request import Request, Sequence
from scheduler_service.core.row_columns import RowWork


@dataclass(frozen=True, slots=True)
class TableWrite:
    """Blocks to be written into the block table of a row, from `start_index` on."""

    row_id: int
    start_index: int
    block_ids: Items[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step; see `ScheduleBatch` in the proto.

    `base_step_id` is None for a snapshot, which then has all rows in `new_sequences`.
    """

    step_id: int
    base_step_id: int | None
    removed_row_ids: Items[int]
    new_sequences: Items[Sequence]
    table_writes: Items[TableWrite]
    work: RowWork


class ContractBroken(Exception):
    """A result that fits no plan; its executor cannot be used any more."""


class StepStatus(Enum):
    """What became of a step."""

    OK = "ok"
    NEED_SNAPSHOT = "need_snapshot"
    REFUSED = "refused"
    FAILED = "failed"


class RowStatus(IntEnum):
    """What became of a row; the numbers are those of the contract."""

    OK = 1
    INVALID_LOGITS = 2
    INPUT_UNAVAILABLE = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's logprob and rank, and the best alternatives as (token, logprob), best first."""

    position: int
    token_id: int
    logprob: float
    rank: int
    top: Items[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step. `token_ids`: [R], -1 for none. `row_statuses` is None if all are OK.

    `logprobs` and `prompt_logprobs` are keyed by row index.
    """

    step_id: int
    status: StepStatus
    token_ids: Items[int] = ()
    row_statuses: Items[int] | None = None
    row_errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, ScoredToken] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Items[ScoredToken]] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True)
class StepEvents:
    """What a result means for clients. `requests[i]` got `token_ids[i]`; the rest is keyed by i.

    `prompt_logprobs` come before the tokens, `finished` after them.
    """

    requests: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, ScoredToken] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Request, Items[ScoredToken]]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
