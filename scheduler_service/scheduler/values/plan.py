"""What the core decides for one step, and what it learns from its result."""

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
    Int32Array,
    Int64Array,
    Request,
    ScoredToken,
    Sequence,
)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row the executor is to know; see `NewRows` in the proto.

    `token_ids`: all tokens known. `encoder_token_ids`: to be encoded with the row's first step.
    """

    sequence: Sequence
    row_id: int
    block_table: Int32Array
    token_ids: Int32Array
    cross_blocks: Items[int] = ()
    encoder_token_ids: Int32Array | None = None


@dataclass(slots=True)
class TableWrites:
    """Blocks that were added to tables of rows the executor knows; see the proto.

    Write i gives row `row_ids[i]` the next `counts[i]` of `block_ids` from `start_indexes[i]` on.
    """

    row_ids: Int32Array
    start_indexes: Int32Array
    counts: Int32Array
    block_ids: Int32Array

    def __bool__(self) -> bool:
        return len(self.row_ids) > 0


@dataclass(slots=True)
class BlockMoves:
    """(source, destination) pairs of the three phases; see `BlockMoves` in the proto."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy)

    def __len__(self) -> int:
        return len(self.swap_out) + len(self.swap_in) + len(self.copy)

    @property
    def device_destinations(self) -> set[int]:
        """Device blocks that are overwritten."""
        return {destination for _, destination in [*self.swap_in, *self.copy]}

    @property
    def host_destinations(self) -> set[int]:
        """Host blocks that are overwritten."""
        return {destination for _, destination in self.swap_out}


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of the tokens that follow the input of rows; see `Work.draft_token_ids` in the proto.

    `counts[i]` of `token_ids`, int32 both, are those of row i, the rows one after the other.
    """

    counts: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class RowWork:
    """What the rows of a step compute; see `Work` in the proto.

    `stay_ids`: [R] int64, which stay of which sequence in the row this is. `row_ids`,
    `num_computed_tokens`, `num_new_tokens`, `sampled_steps_back`: [R]. `samples`: [R] bool, None if
    all rows sample. `token_ids`: [I] int32, the literal input tokens, concatenated.
    `num_run_on_tokens`: [R] int32, how many tokens a row may get by running on; None for none.
    `drafts`: of those whose tokens are known; None for none. As long as steps before this one have
    no result, `num_computed_tokens` are the most they can be.
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

    @property
    def num_more_tokens(self) -> Int32Array | None:
        """How many tokens more than one each row may get, [R]; None if no row may get any."""
        if self.drafts is None:
            return self.num_run_on_tokens
        if self.num_run_on_tokens is None:
            return self.drafts.counts
        return self.drafts.counts + self.num_run_on_tokens

    @property
    def num_inputs(self) -> Int32Array:
        """How many tokens each row computes in the first pass, [R]: its input and its drafts."""
        return (
            self.num_new_tokens if self.drafts is None else self.num_new_tokens + self.drafts.counts
        )

    @property
    def num_written(self) -> Int32Array:
        """How many slots each row writes at most, [R]."""
        num_more = self.num_more_tokens
        return self.num_new_tokens if num_more is None else self.num_new_tokens + num_more

    @property
    def most_tokens(self) -> int:
        """The most that some row may get."""
        num_more = self.num_more_tokens
        return 1 if num_more is None else 1 + int(num_more.max())

    @property
    def num_passes(self) -> int:
        """How often at most the step goes through the model."""
        return 1 if self.num_run_on_tokens is None else 1 + int(self.num_run_on_tokens.max())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step; see `ScheduleBatch` in the proto.

    `base_step_id` is None for a snapshot, which then has all rows in `new_rows`. `published`:
    by stay, blocks that are findable although this step is still to fill them; moves fill those
    of NO_STAY. `notes`: what was done to requests since the last plan;
    `lacks`: who could not begin.
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
    lacks: Mapping[Request, AdmissionBlocker] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Input tokens of the step, drafts among them."""
        work = self.work
        is_decode = len(work.token_ids) == 0
        num_tokens = len(work.row_ids) if is_decode else int(work.num_new_tokens.sum())
        return num_tokens if work.drafts is None else num_tokens + len(work.drafts.token_ids)


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
    NOT_SAMPLED = 5
    GRAMMAR_INVALID = 6


# The slots that such a row was to write are written.
ROW_COMPUTED = frozenset({RowStatus.OK, RowStatus.NOT_SAMPLED, RowStatus.GRAMMAR_INVALID})

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step. `token_ids`: [R] int32, -1 for none. `row_statuses`: None if all OK.

    `token_counts`: [R] int32, how many of `token_ids` are each row's, those of a row after the
    other; None for one each. `logprobs` and `prompt_logprobs` are keyed by row index. `move_us` and
    `compute_us`: what the executor says it took.
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

    def tokens_of(self, index: int) -> list[int]:
        """The tokens of one row."""
        if self.token_counts is None:
            token_id = int(self.token_ids[index])
            return [token_id] if token_id >= 0 else []
        start = int(self.token_counts[:index].sum())
        tokens: list[int] = self.token_ids[start : start + int(self.token_counts[index])].tolist()
        return tokens

    @property
    def counts(self) -> Int32Array:
        """How many tokens each row has, [R]."""
        if self.token_counts is None:
            return (self.token_ids >= 0).astype(np.int32)
        return self.token_counts


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of one sequence, with its score if the request asked for it."""

    sequence: Sequence
    token_id: int
    scored: ScoredToken | None


_NO_KEYS = np.empty(0, np.int64)


@dataclass(slots=True)
class StepEvents:
    """What a result means for clients.

    `client_keys[i]` got `token_ids[i]`: requests of one sequence without logprobs, perhaps several
    times. `tokens`: those of all others. `prompt_logprobs` come before the tokens,
    `finished_sequences` (of requests of several) after them, and `finished` last. `num_sampled`:
    output tokens of each tenant, where the queue policy charges for them. `acquitted`: for those
    who watch, requests from quarantine of which enough was seen.
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
        """Whether something has ended, or somebody is to be charged."""
        return bool(self.finished or self.finished_sequences or self.num_sampled)


# -- What a core did to requests while it planned: told with the plan, for those who watch ---------
#
# Nothing is decided by it.


@dataclass(frozen=True, slots=True)
class Began:
    """It has rows from now on, with `num_tokens` known tokens.

    `num_cached` of them need not be computed, and of these `num_on_host` come from the host pool.
    """

    request: Request
    num_tokens: int
    num_cached: int
    num_on_host: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """It gave up its rows. `mode`: SWAP or RECOMPUTE."""

    request: Request
    mode: PreemptionMode
    cause: PreemptionCause


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """Its blocks come back from the host pool, and it goes on."""

    request: Request


@dataclass(frozen=True, slots=True)
class KvLost:
    """A step failed that it leaned on: what it had computed is computed again."""

    request: Request


Note: TypeAlias = Began | Preempted | SwappedIn | KvLost


# -- What a core has done so far, for those who watch it. Nothing is decided by it -----------------


class PreemptionCause(Enum):
    """Why a request gave up its rows. SHARE: its tenant had more than its share of blocks."""

    BLOCKS = "blocks"
    SHARE = "share"
    URGENCY = "urgency"


class PrefixSource(Enum):
    """What became of prompt tokens when their request began."""

    COMPUTED = "computed"
    DEVICE = "device"
    HOST = "host"


class Tally:
    """Numbers that only grow. `preemptions`: by SWAP or RECOMPUTE, and by cause.

    `prefix_tokens`: prompt tokens of requests that began, by where they were found.
    """

    def __init__(self) -> None:
        self.preemptions = Counter[tuple[PreemptionMode, PreemptionCause]]()
        self.prefix_tokens = Counter[PrefixSource]()

    @property
    def num_preemptions(self) -> int:
        """Of all kinds."""
        return self.preemptions.total()

    def began(self, *, num_prompt_tokens: int, num_cached: int, num_on_host: int) -> None:
        """A request begins; `num_cached` of its prompt exist, `num_on_host` of these only there."""
        num_on_host = min(num_on_host, num_cached)
        self.prefix_tokens[PrefixSource.COMPUTED] += num_prompt_tokens - num_cached
        self.prefix_tokens[PrefixSource.DEVICE] += num_cached - num_on_host
        self.prefix_tokens[PrefixSource.HOST] += num_on_host
