"""Conversion of a checked batch into the runner's input, and of its output into the answer.

Shape letters: R rows of the batch, K rows of it whose input is known or awaited, T input tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from executor_service.steps.batch import BatchContent, Work
from executor_service.steps.pooling import PoolingParams
from executor_service.steps.row_table import RowTable
from executor_service.steps.sampling_params import ParamRows
from executor_service.steps.step import (
    INVALID_LOGITS,
    AwaitedTokens,
    BoolArray,
    Int32Array,
    Int64Array,
    LogprobColumns,
    RowStatus,
    RunWatch,
    StepInput,
    StepOutput,
)
from executor_service.steps.token_runs import TokenRuns

_Number = TypeVar("_Number", np.int32, np.uint8)

_INPUT_UNAVAILABLE = "the input token was never sampled"


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Input of the runner. `step`: the rows whose input is available or awaited.

    `num_rows`: R. `kept_rows`: [K], indexes of the rows of `step` in the batch, None for all.
    """

    step: StepInput
    num_rows: int
    kept_rows: Int64Array | None

    def expect(self, num_more_tokens: Int32Array | None, rows: RowTable) -> None:
        """Notes in `rows` that the step has begun: which rows sample, and at which positions.

        `num_more_tokens`: of the rows of `step`, see PendingStep.
        """
        step, samples = self.step, self.step.samples
        positions = (step.num_computed_tokens + step.num_new_tokens)[samples]
        num_more = None if num_more_tokens is None else num_more_tokens[samples]
        rows.sampled.expect(step.row_ids[samples], step.step_id, positions, num_more)

    def watched_by(self, watch: RunWatch) -> PreparedStep:
        """Returns the same step with `watch`, which gets the tokens of all R rows."""
        kept, num_rows = self.kept_rows, self.num_rows
        of_step = watch if kept is None else lambda runs: watch(runs.spread(kept, num_rows))
        return replace(self, step=replace(self.step, watch=of_step))

    def merge(self, output: StepOutput, rows: RowTable) -> StepOutput:
        """Returns `output` extended to all R rows, without results of rows that miss their input.

        `rows` must have recorded the steps that this step awaited. Raises ValueError if `output`
        has another number of rows than this step.
        """
        for column in (output.row_statuses, output.sampled_token_ids):
            if len(column) != self.step.num_rows:
                raise ValueError(f"{len(column)} results for {self.step.num_rows} rows")
        output = self._without_lost_rows(output, rows)
        return output if self.kept_rows is None else self._spread(output, self.kept_rows)

    def _without_lost_rows(self, output: StepOutput, rows: RowTable) -> StepOutput:
        """Returns `output` without rows whose awaited token is missing or at a later position."""
        awaited = self.step.awaited
        if awaited is None:
            return output
        row_ids = self.step.row_ids[awaited.rows]
        is_missing = rows.sampled.tokens_recorded(row_ids, awaited.step_ids) < 0
        # Of the ways in which an earlier step ends a row, only invalid logits leave a token to go
        # on from. They are then the first logits of the row in this step.
        positions = rows.sampled.positions_recorded(row_ids, awaited.step_ids)
        is_invalid = ~is_missing & (positions != self.step.num_computed_tokens[awaited.rows])
        for is_lost, status, message in (
            (is_missing, RowStatus.INPUT_UNAVAILABLE, _INPUT_UNAVAILABLE),
            (is_invalid, RowStatus.INVALID_LOGITS, INVALID_LOGITS),
        ):
            if np.count_nonzero(is_lost):
                output = _without(output, awaited.rows[is_lost], status, message)
        return output

    def _spread(self, output: StepOutput, kept: Int64Array) -> StepOutput:
        """Returns `output` of the K rows of `step` as output of all R rows."""
        statuses = np.full(self.num_rows, RowStatus.INPUT_UNAVAILABLE, np.uint8)
        statuses[kept] = output.row_statuses
        tokens = np.full(self.num_rows, -1, np.int32)
        tokens[kept] = output.sampled_token_ids
        missing = np.flatnonzero(statuses == RowStatus.INPUT_UNAVAILABLE).tolist()
        errors = dict.fromkeys(missing, _INPUT_UNAVAILABLE)
        errors |= {int(kept[row]): message for row, message in output.row_errors.items()}
        return replace(
            output,
            row_statuses=statuses,
            sampled_token_ids=tokens,
            row_errors=errors,
            logprobs=_renumber(output.logprobs, kept),
            prompt_logprobs=_renumber(output.prompt_logprobs, kept),
            runs=None if output.runs is None else output.runs.spread(kept, self.num_rows),
        )


def prepare_step(
    step_id: int, content: BatchContent, rows: RowTable, unfinished_step_id: int | None = None
) -> PreparedStep:
    """Resolves tokens of earlier steps and drops rows whose input is missing; only reads `rows`.

    `unfinished_step_id`: the oldest step that is not recorded in `rows`; None if there is none.
    """
    work = content.work
    token_ids, is_missing = _resolve_tokens(step_id, work, rows)
    kept = None if is_missing is None else np.flatnonzero(~is_missing)
    if is_missing is not None and kept is not None:
        token_ids = token_ids[np.repeat(~is_missing, work.num_new_tokens)]
    awaited = None
    if unfinished_step_id is not None and len(work.sampled_steps_back):
        steps_back = _select(work.sampled_steps_back, kept)
        awaited = _find_awaited(step_id, steps_back, unfinished_step_id)
    row_ids = _select(work.row_ids, kept)
    samples: BoolArray = np.ones(len(row_ids), np.bool_)
    if len(work.samples):
        samples = _select(work.samples, kept) != 0
    params = rows.sampling_params(row_ids)
    step = StepInput(
        step_id=step_id,
        swap_out=content.swap_out,
        swap_in=content.swap_in,
        copy=content.copy,
        row_ids=row_ids,
        num_computed_tokens=_select(first_positions(step_id, work, rows), kept),
        num_new_tokens=_select(work.num_new_tokens, kept),
        token_ids=token_ids,
        samples=samples,
        block_tables=rows.tables.of_rows(row_ids),
        tables=rows.tables,
        num_prompt_tokens=rows.num_prompt_tokens(row_ids),
        seeds=rows.seeds(row_ids),
        sampling_params=params,
        histories=rows.histories(row_ids),
        adapters=rows.adapters(row_ids),
        cross=rows.cross(row_ids),
        awaited=awaited,
        grammars=rows.grammars(row_ids),
        num_run_on_tokens=_num_run_on_tokens(work, kept),
        drafts=_drafts(work, kept),
        pooling=_pooling(params),
    )
    return PreparedStep(step, len(work.row_ids), kept)


def first_positions(step_id: int, work: Work, rows: RowTable) -> Int32Array:
    """Returns the position at which the input of each row begins, [R].

    A row that got fewer tokens than it might have begins earlier than `num_computed_tokens` says.
    """
    most = work.num_computed_tokens
    if not len(work.sampled_steps_back):
        return most
    return rows.sampled.positions(work.row_ids, step_id, work.sampled_steps_back, most)


def _num_run_on_tokens(work: Work, kept: Int64Array | None) -> Int32Array | None:
    """Returns how many tokens each row may run on, [K]; None if no row may get several."""
    if not work.has_several:
        return None
    if not len(work.num_run_on_tokens):
        return np.zeros(len(work.row_ids) if kept is None else len(kept), np.int32)
    return _select(work.num_run_on_tokens, kept)


def _pooling(params: ParamRows) -> list[PoolingParams | None]:
    """Returns the vector that each row asks for; an empty list if rows sample tokens."""
    if not len(params) or params[0].pooling is None:
        return []
    return [each.pooling for each in params.objects]


def _drafts(work: Work, kept: Int64Array | None) -> TokenRuns | None:
    """Returns the draft tokens of the K rows; None if there are none."""
    if not len(work.draft_token_ids):
        return None
    drafts = TokenRuns(work.draft_offsets, work.draft_token_ids)
    return drafts if kept is None else drafts.take(kept)


def _resolve_tokens(
    step_id: int, work: Work, rows: RowTable
) -> tuple[Int32Array, BoolArray | None]:
    """Returns the input tokens [T], and which rows miss theirs [R] (None: no row)."""
    steps_back = work.sampled_steps_back
    if not np.count_nonzero(steps_back):
        return work.token_ids, None
    sampled = rows.sampled.tokens(work.row_ids, step_id, steps_back)
    is_sampled = steps_back > 0
    if len(work.token_ids) == 0:
        token_ids = sampled
    else:
        is_literal = np.repeat(~is_sampled, work.num_new_tokens)
        token_ids = np.empty(len(is_literal), np.int32)
        token_ids[is_literal] = work.token_ids
        # A row whose token was sampled has one input token, so its last token is that one.
        last_tokens = np.cumsum(work.num_new_tokens) - 1
        token_ids[last_tokens[is_sampled]] = sampled[is_sampled]
    is_missing = is_sampled & (sampled < 0)
    return token_ids, is_missing if np.count_nonzero(is_missing) else None


def _find_awaited(
    step_id: int, steps_back: Int32Array, unfinished_step_id: int
) -> AwaitedTokens | None:
    source_ids = step_id - steps_back.astype(np.int64)
    awaiting = np.flatnonzero((steps_back > 0) & (source_ids >= unfinished_step_id))
    return AwaitedTokens(awaiting, source_ids[awaiting]) if len(awaiting) else None


def _without(output: StepOutput, lost: Int64Array, status: RowStatus, message: str) -> StepOutput:
    """Returns `output` with `status` and `message` for the rows `lost`, without their results."""
    statuses, tokens = output.row_statuses.copy(), output.sampled_token_ids.copy()
    statuses[lost] = status
    tokens[lost] = -1
    errors = dict(output.row_errors) | dict.fromkeys(lost.tolist(), message)
    logprobs, prompt_logprobs = (
        None if columns is None else columns.without(lost)
        for columns in (output.logprobs, output.prompt_logprobs)
    )
    return replace(
        output,
        row_statuses=statuses,
        sampled_token_ids=tokens,
        row_errors=errors,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        runs=None if output.runs is None else output.runs.without(lost),
    )


def _select(column: npt.NDArray[_Number], kept: Int64Array | None) -> npt.NDArray[_Number]:
    return column if kept is None else column[kept]


def _renumber(columns: LogprobColumns | None, kept: Int64Array) -> LogprobColumns | None:
    """Returns `columns` with row indexes of the batch instead of those of the runner's rows."""
    if columns is None:
        return None
    return replace(columns, row_indexes=kept[columns.row_indexes].astype(np.int32))
