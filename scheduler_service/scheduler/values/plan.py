"""Plan of one step, its outcome, and the events and counters that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np

from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import (
    BoolArray,
    EncoderFeatures,
    Int32Array,
    Int64Array,
    Request,
    ScoredToken,
    Sequence,
)


@dataclass(frozen=True, slots=True)
class NewRow:
    """Row that is new to the executor; see `NewRows` in the proto.

    `token_ids`: all known tokens. `encoder_token_ids`, `encoder_features`: input to encode with the
    row's first step.
    """

    sequence: Sequence
    row_id: int
    block_table: Int32Array
    token_ids: Int32Array
    cross_blocks: Items[int] = ()
    encoder_token_ids: Int32Array | None = None
    encoder_features: EncoderFeatures | None = None


@dataclass(slots=True)
class TableWrites:
    """Blocks appended to block tables of rows that the executor knows; see the proto.

    Write i gives row `row_ids[i]` the next `counts[i]` of `block_ids`, from `start_indexes[i]` on.
    """

    row_ids: Int32Array
    start_indexes: Int32Array
    counts: Int32Array
    block_ids: Int32Array

    def __bool__(self) -> bool:
        return len(self.row_ids) > 0


@dataclass(slots=True)
class BlockMoves:
    """Block moves of the three phases as (source, destination); see `BlockMoves` in the proto."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy)

    def __len__(self) -> int:
        return len(self.swap_out) + len(self.swap_in) + len(self.copy)

    @property
    def device_destinations(self) -> set[int]:
        """Device blocks that the moves overwrite."""
        return {destination for _, destination in [*self.swap_in, *self.copy]}

    @property
    def host_destinations(self) -> set[int]:
        """Host blocks that the moves overwrite."""
        return {destination for _, destination in self.swap_out}


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens that follow the input of rows; see `Work.draft_token_ids` in the proto.

    `counts`: [R] int32, draft tokens of each row. `token_ids`: int32, concatenated in row order.
    """

    counts: Int32Array
    token_ids: Int32Array


@dataclass(slots=True)  # each step makes one, and frozen ones take three times as long
class RowWork:
    """Work of the rows of a step; see `Work` in the proto.

    `stay_ids`: [R] int64, the stay (glossary) of the sequence in each row. `row_ids`,
    `num_computed_tokens`, `num_new_tokens`, `sampled_steps_back`: [R]. `samples`: [R] bool, None if
    all rows sample. `token_ids`: [I] int32, the literal input tokens, concatenated.
    `num_run_on_tokens`: [R] int32, most tokens that a row may get by running on; None for none.
    `drafts`: only of rows whose tokens are known; None for none. `reports_parts`: the executor
    reports tokens of rows that run on at once, and ends the run when a later step arrives. While
    earlier steps have no result, `num_computed_tokens` are upper bounds.
    """

    row_ids: Int64Array
    stay_ids: Int64Array
    num_computed_tokens: Int32Array
    num_new_tokens: Int32Array
    sampled_steps_back: Int32Array
    token_ids: Int32Array
    samples: BoolArray | None
    num_run_on_tokens: Int32Array | None = None
    drafts: Drafts | None = None
    reports_parts: bool = False

    @property
    def num_more_tokens(self) -> Int32Array | None:
        """Maximum number of extra tokens of each row, [R]; None if rows get one token each."""
        if self.drafts is None:
            return self.num_run_on_tokens
        if self.num_run_on_tokens is None:
            return self.drafts.counts
        return self.drafts.counts + self.num_run_on_tokens

    @property
    def num_inputs(self) -> Int32Array:
        """Number of tokens that each row computes in the first pass, [R]: input and drafts."""
        return (
            self.num_new_tokens if self.drafts is None else self.num_new_tokens + self.drafts.counts
        )

    @property
    def num_written(self) -> Int32Array:
        """Most slots that each row writes, [R]."""
        num_more = self.num_more_tokens
        return self.num_new_tokens if num_more is None else self.num_new_tokens + num_more

    @property
    def most_tokens(self) -> int:
        """Upper bound on the tokens of any single row."""
        num_more = self.num_more_tokens
        return 1 if num_more is None else 1 + int(num_more.max())

    @property
    def num_passes(self) -> int:
        """Most forward passes of the step."""
        return 1 if self.num_run_on_tokens is None else 1 + int(self.num_run_on_tokens.max())


@dataclass(slots=True)  # as `RowWork`
class StepPlan:
    """Plan of one step; see `ScheduleBatch` in the proto.

    `base_step_id`: None for a snapshot, which then has all rows in `new_rows`. `published`: blocks
    by stay that the prefix cache finds although this step is still to fill them; block moves fill
    the blocks of NO_STAY. `notes`: changes of requests since the last plan. `blockers`: reasons of
    requests that could not begin.
    """

    step_id: int
    base_step_id: int | None
    removed_row_ids: Items[int]
    new_rows: Items[NewRow]
    table_writes: TableWrites
    moves: BlockMoves
    work: RowWork
    published: Mapping[int, list[int]] = field(default_factory=dict)
    planned_at_ns: int = 0
    notes: Items[Note] = ()
    blockers: Mapping[Request, AdmissionBlocker] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of input tokens of the step, drafts included."""
        work = self.work
        is_decode = len(work.token_ids) == 0
        num_tokens = len(work.row_ids) if is_decode else int(work.num_new_tokens.sum())
        return num_tokens if work.drafts is None else num_tokens + len(work.drafts.token_ids)


class ContractBroken(Exception):
    """Raised for a result that contradicts its plan; the executor cannot be used any more."""


class StepStatus(Enum):
    """Outcome of a step."""

    OK = "ok"
    NEED_SNAPSHOT = "need_snapshot"
    REFUSED = "refused"
    FAILED = "failed"


class RowStatus(IntEnum):
    """Outcome of a row, numbered as in the executor contract."""

    OK = 1
    INVALID_LOGITS = 2
    INPUT_UNAVAILABLE = 3
    FAILED = 4
    NOT_SAMPLED = 5
    GRAMMAR_INVALID = 6


# Statuses of rows whose slots are all written.
ROW_COMPUTED = frozenset({RowStatus.OK, RowStatus.NOT_SAMPLED, RowStatus.GRAMMAR_INVALID})

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step, as the executor reports it.

    `token_ids`: int32, tokens of all rows in row order; without `token_counts` [R], -1 for no
    token. `token_counts`: [R] int32, how many of `token_ids` each row has; None for one each.
    `row_statuses`: [R], None if all rows are OK. `row_errors`, `logprobs` and `prompt_logprobs` are
    keyed by row index. `move_us`, `compute_us`: times measured by the executor, in µs. `vectors`:
    float32, little-endian, by row index.
    """

    step_id: int
    status: StepStatus
    token_ids: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    row_statuses: Items[int] | None = None
    row_errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, Items[ScoredToken]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Items[ScoredToken]] = field(default_factory=dict)
    error: str = ""
    move_us: int = 0
    compute_us: int = 0
    token_counts: Int32Array | None = None
    vectors: Mapping[int, bytes] = field(default_factory=dict)

    def tokens_of(self, index: int) -> list[int]:
        """Returns the tokens of the row at `index`."""
        if self.token_counts is None:
            token_id = int(self.token_ids[index])
            return [token_id] if token_id >= 0 else []
        start = int(self.token_counts[:index].sum())
        tokens: list[int] = self.token_ids[start : start + int(self.token_counts[index])].tolist()
        return tokens

    @property
    def counts(self) -> Int32Array:
        """Number of tokens of each row, [R] int32."""
        if self.token_counts is None:
            return (self.token_ids >= 0).astype(np.int32)
        return self.token_counts


@dataclass(frozen=True, slots=True)
class StepPart:
    """New tokens of a step that is still running. Its result will contain them, too.

    `counts`: [R] int32, how many of `token_ids` (int32, in row order) each row has.
    """

    step_id: int
    counts: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New token of one sequence, with its score if the request asked for logprobs."""

    sequence: Sequence
    token_id: int
    scored: ScoredToken | None


_NO_KEYS = np.empty(0, np.int64)


@dataclass(slots=True)
class StepEvents:
    """Client-visible events of a result.

    `client_keys[i]` got `token_ids[i]`, for requests of one sequence without logprobs; a key may
    occur several times. `tokens`: tokens of all other requests. `prompt_logprobs` come before the
    tokens, `finished_sequences` (of requests with several sequences) after them, and `finished`
    last. `num_sampled`: output tokens of each tenant, where the queue policy charges for them.
    `acquitted`: for logs and metrics, requests from quarantine whose trials are over.
    """

    client_keys: Int64Array = field(default_factory=lambda: _NO_KEYS)
    token_ids: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    tokens: list[TokenEvent] = field(default_factory=list)
    prompt_logprobs: list[tuple[Request, Items[ScoredToken]]] = field(default_factory=list)
    finished_sequences: list[Sequence] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_sampled: Mapping[str, int] = field(default_factory=dict)
    acquitted: Items[Request] = ()

    @property
    def any_ended(self) -> bool:
        """Whether a request or sequence ended, or a tenant is to be charged."""
        return bool(self.finished or self.finished_sequences or self.num_sampled)


# -- Notes on requests -----------------------------------------------------------------------------
#
# An engine returns them with its plan, for logs and metrics; no decision uses them.


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """Request that got rows, with `num_tokens` known tokens.

    `num_cached` of these tokens need not be computed; blocks of `num_on_host` of the cached tokens
    come from the host pool.
    """

    request: Request
    num_tokens: int
    num_cached: int
    num_on_host: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """Request that gave up its rows. `mode`: SWAP or RECOMPUTE."""

    request: Request
    mode: PreemptionMode
    cause: PreemptionCause


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """Request that resumes: its blocks return from the host pool."""

    request: Request


@dataclass(frozen=True, slots=True)
class KvLost:
    """Request whose KV depended on a failed step, and is recomputed."""

    request: Request


Note: TypeAlias = StartedRequest | Preempted | SwappedIn | KvLost


# -- Counters of an engine -------------------------------------------------------------------------
#
# For metrics; no decision uses them.


class PreemptionCause(Enum):
    """Reason of a preemption. SHARE: the tenant had more than its share of blocks."""

    BLOCKS = "blocks"
    SHARE = "share"
    URGENCY = "urgency"


class PrefixSource(Enum):
    """Source of a prompt token's KV when its request began."""

    COMPUTED = "computed"
    DEVICE = "device"
    HOST = "host"


class StepCounters:
    """Counters that only grow.

    `preemptions`: by mode (SWAP or RECOMPUTE) and cause. `prefix_tokens`: prompt tokens of requests
    that began, by the source of their KV.
    """

    def __init__(self) -> None:
        self.preemptions = Counter[tuple[PreemptionMode, PreemptionCause]]()
        self.prefix_tokens = Counter[PrefixSource]()

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions of all modes and causes."""
        return self.preemptions.total()

    def began(self, *, num_prompt_tokens: int, num_cached: int, num_on_host: int) -> None:
        """Counts the prompt of a request that begins.

        `num_cached` prompt tokens have KV; the KV of `num_on_host` of these is in the host pool
        only.
        """
        num_on_host = min(num_on_host, num_cached)
        self.prefix_tokens[PrefixSource.COMPUTED] += num_prompt_tokens - num_cached
        self.prefix_tokens[PrefixSource.DEVICE] += num_cached - num_on_host
        self.prefix_tokens[PrefixSource.HOST] += num_on_host
