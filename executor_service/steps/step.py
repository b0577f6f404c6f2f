"""Input and output of one step for the compute side: plain arrays, no protobuf, no torch.

Also holds the interface of runners, and functions that split a step into parts. Shape letters: R
rows of the step, T input tokens over all rows, M blocks of the longest block table in the step, X
blocks of the longest cross table, K scored tokens, N alternatives over all scored tokens, A rows
whose input token is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from executor_service.steps.block_tables import BlockTables
from executor_service.steps.pooling import PoolingParams
from executor_service.steps.sampling_params import ParamRows, StepGrammars
from executor_service.steps.token_runs import TokenRuns

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


INVALID_LOGITS = "the model returned logits with NaN or +inf, or only -inf"


class RowStatus(IntEnum):
    """Outcome of one row; the numbers are those of the contract."""

    OK = 1
    INVALID_LOGITS = 2
    INPUT_UNAVAILABLE = 3
    FAILED = 4
    NOT_SAMPLED = 5
    GRAMMAR_INVALID = 6


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Block pairs of one phase: `sources[i]` is copied over `destinations[i]`, all reads first."""

    sources: Int32Array
    destinations: Int32Array


_NO_BLOCKS = np.empty(0, np.int32)
NO_MOVES = BlockMoves(_NO_BLOCKS, _NO_BLOCKS)


# Called while the rows of a step run on, after each token that is not the last, with all tokens
# that the rows [R] have got so far. Returns whether they may get more: False as soon as another
# batch waits, and from then on. It is called in any thread, one call at a time, and raises nothing.
RunWatch = Callable[[TokenRuns], bool]


# Token ids [E] int32, or features of audio, float32: all frames of a mel bin, bin by bin.
EncoderInput = Int32Array | Float32Array


@dataclass(frozen=True, slots=True)
class CrossInput:
    """Encoder output that the rows of a step attend to beside their own tokens.

    `num_encoder_tokens`: [R] int32, 0 for a row without. `block_tables`: [R, X] int32, the blocks
    of the encoder tokens, padded with -1. `encoder_inputs`: R long; what is encoded into those
    blocks before any row attends, empty for a row whose encoder tokens are in its blocks already.
    """

    num_encoder_tokens: Int32Array
    block_tables: Int32Array
    encoder_inputs: Sequence[EncoderInput]


@dataclass(frozen=True, slots=True)
class AwaitedTokens:
    """Input tokens that the host does not know, because the steps that sample them are unfinished.

    `rows`: [A] int64, rising indexes of rows. Each has one input token, which its row id samples in
    step `step_ids` [A] int64. If that step turns out to sample no token (-1), the row computes
    arbitrary values and writes them to its slots, and its results are dropped when the step is
    finished.
    """

    rows: Int64Array
    step_ids: Int64Array


@dataclass(frozen=True, slots=True)
class StepInput:
    """Validated step. Executed as swap_out, swap_in, copy, compute, sample.

    Rows: `row_ids`, `num_computed_tokens`, `num_new_tokens`, `num_prompt_tokens`: [R] int32.
    `samples`: [R] bool. `seeds`: [R] int64. `sampling_params`: R sets. `adapters`: R names, empty
    for a row without; () if no row has one.

    Input tokens: `token_ids`: [T] int32, rows concatenated; those of `awaited` rows have no
    meaning. `awaited`: None if all tokens are known.

    Blocks: `block_tables`: [R, M] int32, padded with -1. Entries wholly behind the model's sliding
    window may also be -1, or name a block that the row no longer owns. `tables`: the tables of all
    row ids, of which `block_tables` are copies, as they are when the step begins; None if they are
    not kept. `cross`: None if no row has encoder tokens.

    Histories: R long; all tokens of the sequence known so far (the input tokens included), or None
    where the params need none. From step to step a row's history is the same object, so tokens of
    awaited steps appear in it later. Rows whose params say `reads_output` await nothing.
    `grammars`: None if no row has one, or if this executor does not follow them.

    Several tokens: `num_run_on_tokens`: [R] int32, number of further tokens that each row may get
    by running on; None if no row may get any. The code that runs such a step appends to the
    histories all tokens that rows go on from. `drafts`: R sequences of draft tokens after the
    input, for rows that sample; None if there are none, and whenever `num_run_on_tokens` is None.
    `follows`: [R] bool, rows that go on where the row before them ends, in the same blocks; None if
    there are none. `watch`: gets tokens of rows that run on, and may end the step early; None for a
    step that runs on to its end. A runner that gives all tokens in one go may ignore it.

    Vectors: `pooling`: R long, vector that each row returns in place of a token; () if the model
    returns tokens.
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
    histories: Sequence[list[int] | None]
    adapters: Sequence[str] = ()
    cross: CrossInput | None = None
    awaited: AwaitedTokens | None = None
    grammars: StepGrammars | None = None
    tables: BlockTables | None = None
    num_run_on_tokens: Int32Array | None = None
    drafts: TokenRuns | None = None
    follows: BoolArray | None = None
    watch: RunWatch | None = None
    pooling: Sequence[PoolingParams | None] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.row_ids)

    @property
    def moves_blocks(self) -> bool:
        """Whether the step moves blocks before rows are computed."""
        return any(len(moves.sources) for moves in (self.swap_out, self.swap_in, self.copy))


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

    def without(self, rows: Int64Array) -> LogprobColumns | None:
        """Returns the scores of all rows except `rows`; None if no score is left."""
        is_kept = ~np.isin(self.row_indexes, rows)
        if not is_kept.any():
            return None
        num_top = np.diff(self.top_offsets)
        is_top_kept = np.repeat(is_kept, num_top)
        return LogprobColumns(
            self.row_indexes[is_kept],
            self.positions[is_kept],
            self.token_ids[is_kept],
            self.logprobs[is_kept],
            self.ranks[is_kept],
            np.concatenate([[0], np.cumsum(num_top[is_kept])]).astype(np.int32),
            self.top_token_ids[is_top_kept],
            self.top_logprobs[is_top_kept],
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of the rows of a step.

    `row_statuses`: [R] uint8. `sampled_token_ids`: [R] int32, the last token of each row, -1 for
    none. `runs`: all tokens, where rows were allowed to have several. `row_errors`: messages for
    people, by row index. `move_us`, `forward_us`, `sample_us`: durations of the parts. `vectors`: R
    long, None for rows without; () if the model returns tokens.
    """

    row_statuses: UInt8Array
    sampled_token_ids: Int32Array
    row_errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    move_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    runs: TokenRuns | None = None
    vectors: Sequence[Float32Array | None] = ()

    def token_ids_of(self, row: int) -> list[int]:
        """Returns the tokens that a row sampled; an empty list for none."""
        if self.runs is None:
            token_id = int(self.sampled_token_ids[row])
            return [token_id] if token_id >= 0 else []
        start, end = self.runs.offsets[row : row + 2].tolist()
        token_ids: list[int] = self.runs.token_ids[start:end].tolist()
        return token_ids


class PendingStep(Protocol):
    """Step that has begun. Steps are finished in the order in which they began."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once. Stays true from then on. Raises nothing."""
        ...

    @property
    def num_more_tokens(self) -> Int32Array | None:
        """Number of tokens that an unfinished step gives a row beyond the first, [R]; None for 0.

        A row gets fewer only if it ends: by a stop token, or before invalid logits. So a step that
        asks its `watch` is done when `begin` returns.
        """
        ...

    def wait(self) -> None:
        """Returns when the step is done. May be called in any thread. Raises nothing."""
        ...

    def finish(self) -> StepOutput:
        """Waits, and returns the output of the step. Must be called once. Raises StepFailed."""
        ...


class Runner(Protocol):
    """Begins steps one after the other against its own KV pools."""

    def begin(self, step: StepInput) -> PendingStep | None:
        """Starts `step`, which writes the KV pools; steps that begin later see these writes.

        Returns None if `step` would have to wait for unfinished steps: nothing was done then, and
        `step` can begin once they are finished. Raises StepFailed if no row can be answered.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Step that was done when `begin` returned."""

    output: StepOutput

    @property
    def is_done(self) -> bool:
        return True

    @property
    def num_more_tokens(self) -> None:
        """Always None: the output contains the tokens of each row."""

    def wait(self) -> None:
        """Returns immediately; the step has finished."""

    def finish(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class FailedStep:
    """Step that could not begin."""

    error: Exception

    @property
    def is_done(self) -> bool:
        return True

    @property
    def num_more_tokens(self) -> None:
        """Always None, because no row of a failed step gets a token."""

    def wait(self) -> None:
        """Returns at once: the step has failed."""

    def finish(self) -> StepOutput:
        """Raises `error`."""
        raise self.error


def execute_step(runner: Runner, step: StepInput) -> StepOutput:
    """Begins and finishes `step`; all steps before must be finished. Raises StepFailed."""
    pending = runner.begin(step)
    assert pending is not None, "all earlier steps are finished"
    return pending.finish()


# -- Parts of a step that run one after the other, and joining of their scores ---------------------
#
# Shape letters: R rows of the step, K rows of a part, T input tokens of a part.

_NO_TOKENS = np.empty(0, np.int32)


def part_of(
    step: StepInput,
    rows: Int64Array,
    *,
    num_computed_tokens: Int32Array,
    num_new_tokens: Int32Array,
    token_ids: Int32Array,
    samples: BoolArray,
) -> StepInput:
    """Returns a step of `rows` [K] alone, without block moves, with input `token_ids` [T].

    The part awaits nothing and encodes nothing. None of its rows has draft tokens or runs on, and
    it has no watch.
    """
    return replace(
        step,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=step.row_ids[rows],
        num_computed_tokens=num_computed_tokens,
        num_new_tokens=num_new_tokens,
        token_ids=token_ids,
        samples=samples,
        block_tables=step.block_tables[rows],
        num_prompt_tokens=step.num_prompt_tokens[rows],
        seeds=step.seeds[rows],
        sampling_params=step.sampling_params.take(rows),
        histories=[step.histories[row] for row in rows.tolist()],
        adapters=[step.adapters[row] for row in rows.tolist()] if step.adapters else (),
        pooling=[step.pooling[row] for row in rows.tolist()] if step.pooling else (),
        cross=None if step.cross is None else _encoded(step.cross, rows),
        awaited=None,
        grammars=None if step.grammars is None else step.grammars.take(rows),
        num_run_on_tokens=None,
        follows=None,
        drafts=None,
        watch=None,
    )


def _encoded(cross: CrossInput, rows: Int64Array) -> CrossInput:
    """Returns the encoder data of `rows`, with nothing left to encode."""
    return CrossInput(
        cross.num_encoder_tokens[rows], cross.block_tables[rows], [_NO_TOKENS] * len(rows)
    )


def join_columns(parts: Sequence[LogprobColumns], kept_rows: BoolArray) -> LogprobColumns | None:
    """Joins the scores of all `parts`, ordered by row, then position; None if none is left.

    `kept_rows`: [R], the rows whose scores are kept.
    """
    if not parts:
        return None
    row_indexes, positions = _joined(parts, "row_indexes"), _joined(parts, "positions")
    order = np.lexsort((positions, row_indexes))
    order = order[kept_rows[row_indexes[order]]]
    if not len(order):
        return None
    counts = np.concatenate([np.diff(part.top_offsets) for part in parts])
    starts = np.cumsum(counts) - counts
    top_offsets = np.concatenate([[0], np.cumsum(counts[order])])
    top_order = np.repeat(starts[order] - top_offsets[:-1], counts[order])
    top_order += np.arange(len(top_order))
    return LogprobColumns(
        row_indexes=row_indexes[order],
        positions=positions[order],
        token_ids=_joined(parts, "token_ids")[order],
        logprobs=_joined(parts, "logprobs")[order],
        ranks=_joined(parts, "ranks")[order],
        top_offsets=top_offsets.astype(np.int32),
        top_token_ids=_joined(parts, "top_token_ids")[top_order],
        top_logprobs=_joined(parts, "top_logprobs")[top_order],
    )


def _joined(parts: Sequence[LogprobColumns], column: str) -> npt.NDArray[Any]:
    return np.concatenate([getattr(part, column) for part in parts])
