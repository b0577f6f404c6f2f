"""One step as the compute side sees it: plain arrays, no protobuf, no torch.

Shape letters: R rows of the step, T input tokens over all rows, M blocks of the longest block
table in the step, X blocks of the longest cross table, K scored tokens, N alternatives over all
scored tokens, A rows whose input token is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from executor_service.steps.block_tables import BlockTables
from executor_service.steps.sampling_params import ParamRows, StepGrammars
from executor_service.steps.token_runs import TokenRuns

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


INVALID_LOGITS = "the model returned logits that are NaN, +inf, or -inf alone"


class RowStatus(IntEnum):
    """What became of one row; the numbers are those of the contract."""

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
class AwaitedTokens:
    """Input tokens that nobody on the host knows: steps sample them that have begun only.

    `rows`: [A] int64, rising indexes of rows; each has one input token, the one its row id samples
    in step `step_ids` [A] int64. It may turn out to be none (-1): such a row computes anything and
    writes anything to its slots, and whoever finishes the step drops its results.
    """

    rows: Int64Array
    step_ids: Int64Array


@dataclass(frozen=True, slots=True)
class StepInput:
    """A validated step. Executed as swap_out, swap_in, copy, compute, sample.

    `row_ids`, `num_computed_tokens`, `num_new_tokens`, `num_prompt_tokens`: [R] int32.
    `token_ids`: [T] int32, rows concatenated; those of `awaited` rows mean nothing.
    `samples`: [R] bool. `seeds`: [R] int64.
    `block_tables`: [R, M] int32, padded with -1. Entries wholly behind the model's sliding window
    may be -1 too, or name a block that is no longer the row's.
    `sampling_params`, `histories`: R long. A history is all tokens of the sequence known so far
    (the input tokens included), or None where the params need none. From step to step it is the
    same object, for as long as the row is there, so what awaited steps sample comes to be in it;
    for rows whose params say `reads_output`, nothing is awaited.
    `num_run_on_tokens`: [R] int32, how many tokens more each may get by running on; None if no row
    may get any; whoever runs such a step appends to histories what rows go on from. `drafts`: R
    guesses of what follows the input, of rows that sample; None if there are none, and where
    `num_run_on_tokens` is None. `follows`: [R] bool, which rows go on where the row before them
    ends, in the same blocks; None if none does.
    `adapters`: R names, empty for a row without; or nothing at all if no row has one. `cross`: None
    if no row has encoder tokens. `awaited`: None if all tokens are known. `grammars`: None if no
    row has one, or nobody here follows them. `tables`: those of all row ids, of which
    `block_tables` are copies, as they are while the step begins; None if nobody keeps them.
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

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_ids)

    @property
    def moves_blocks(self) -> bool:
        """Whether anything comes before rows are computed."""
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
        """The scores of all rows but these; None if no row is left."""
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
    """What came of the rows of a step.

    `row_statuses`: [R] uint8. `sampled_token_ids`: [R] int32, the last token of each, -1 for none.
    `runs`: all tokens, where rows were allowed to have several. `row_errors`: what to tell people,
    by indexes of rows. `move_us`, `forward_us`, `sample_us`: how long its parts took.
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

    def token_ids_of(self, row: int) -> list[int]:
        """What a row sampled; nothing is an empty list."""
        if self.runs is None:
            token_id = int(self.sampled_token_ids[row])
            return [token_id] if token_id >= 0 else []
        start, end = self.runs.offsets[row : row + 2].tolist()
        token_ids: list[int] = self.runs.token_ids[start:end].tolist()
        return token_ids


class PendingStep(Protocol):
    """A step that has begun. Steps are finished in the order in which they began."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would wait for nothing. Once it is, it stays so. Raises nothing."""
        ...

    @property
    def num_more_tokens(self) -> Int32Array | None:
        """[R], how many more than one each row gets if it is not done; None for none.

        A row gets fewer only if it ends: by a token that ends it, or before invalid logits.
        """
        ...

    def wait(self) -> None:
        """Returns when it is done. May be called in any thread. Raises nothing."""
        ...

    def finish(self) -> StepOutput:
        """Waits, and returns what became of the step; to be called once. Raises StepFailed."""
        ...


class Runner(Protocol):
    """Begins steps one after the other against its own KV pools."""

    def begin(self, step: StepInput) -> PendingStep | None:
        """Asks for `step`, which writes the KV pools; what is asked for later finds it done.

        None if it would have to wait for steps that are not finished: then nothing was done, and
        `step` can begin when they are. Raises StepFailed if no row can be answered.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was over when `begin` returned."""

    output: StepOutput

    @property
    def is_done(self) -> bool:
        return True

    @property
    def num_more_tokens(self) -> None:
        """The output says what each got."""

    def wait(self) -> None:
        """It is over."""

    def finish(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that could not begin."""

    error: Exception

    @property
    def is_done(self) -> bool:
        return True

    @property
    def num_more_tokens(self) -> None:
        """Nobody gets any."""

    def wait(self) -> None:
        """It is over."""

    def finish(self) -> StepOutput:
        """Raises `error`."""
        raise self.error


def execute_step(runner: Runner, step: StepInput) -> StepOutput:
    """Begins and finishes `step`; all steps before are finished. Raises StepFailed."""
    pending = runner.begin(step)
    assert pending is not None, "there is no step to wait for"
    return pending.finish()


# -- Parts of a step that are run one after the other, and their scores as those of one step -------
#
# Shape letters: R rows of the step, K rows of a part, T input tokens of it.

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
    """A step of `rows` [K] alone, without block moves; `token_ids` [T] are what it computes.

    Nothing is awaited, nothing encoded, and no row has drafts or runs on.
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
        cross=None if step.cross is None else _encoded(step.cross, rows),
        awaited=None,
        grammars=None if step.grammars is None else step.grammars.take(rows),
        num_run_on_tokens=None,
        follows=None,
        drafts=None,
    )


def _encoded(cross: CrossInput, rows: Int64Array) -> CrossInput:
    """What `rows` have of an encoder whose tokens are encoded."""
    return CrossInput(
        cross.num_encoder_tokens[rows], cross.block_tables[rows], [_NO_TOKENS] * len(rows)
    )


def join_columns(parts: Sequence[LogprobColumns], kept_rows: BoolArray) -> LogprobColumns | None:
    """The scores of all `parts` in one, ordered; None if none is left.

    `kept_rows`: [R], those whose scores stay.
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
