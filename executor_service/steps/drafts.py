"""Steps whose rows may get several tokens: verification of draft tokens, and rows that run on.

Draft tokens are verified in one forward pass, in which each draft token is a row of its own. The
draft token is the only input token of such a row. The row begins where the row before it ends, in
the same blocks. In every layer all KV writes come before any read, so a draft token attends to the
input and to the draft tokens before it: it is computed and sampled as if the row had come there one
token a step. An error in a draft row does not affect the rows before it. A pass on a GPU may join a
row and its draft tokens, so that attention reads their keys once; the tokens are the same.

Shape letters: R rows of the step, D draft tokens, L lines (rows of the pass): R + D.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from executor_service.errors import ExecutorError
from executor_service.steps.step import (
    BoolArray,
    CrossInput,
    Int32Array,
    Int64Array,
    LogprobColumns,
    RowStatus,
    StepInput,
    StepOutput,
    join_columns,
    part_of,
)
from executor_service.steps.token_runs import TokenRuns

# Limit of draft tokens in a step: each needs logits, 150 MB for 256 with a vocabulary of 150 000.
MAX_NUM_DRAFTS = 256
_NO_TOKENS = np.empty(0, np.int32)
_NO_ROWS = np.empty(0, np.int64)
_NO_RUNS = TokenRuns.of([])

_log = logging.getLogger(__name__)


def verify_drafts(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
    """Runs `step` and its draft tokens in one pass by `execute`; no row runs on.

    Rows with the most draft tokens lose their last ones where there are more than MAX_NUM_DRAFTS.
    If the pass fails, it is repeated without draft tokens, because they may be the cause, unless
    the step moves blocks. Raises what `execute` raises.
    """
    drafts = step.drafts
    step = replace(step, drafts=None, num_run_on_tokens=None, watch=None)
    if drafts is None or not len(drafts.token_ids):
        return execute(step)
    drafted = _DraftedStep.of(step, _fewer(drafts))
    try:
        output = execute(drafted.rows)
    except ExecutorError:
        if step.moves_blocks:
            # Some of the blocks may have been moved already, so the pass cannot be repeated.
            raise
        _log.exception("drafts_left_out step_id=%d", step.step_id)
        return execute(step)
    return drafted.taken(output)


@dataclass(frozen=True, slots=True)
class _DraftedStep:
    """Step whose rows are the rows of another step, each followed by its draft tokens.

    `rows`: the step to run, of L lines. `row_of_line`: [L], the row of the other step that each
    line belongs to. `first_lines`: [R], the line of each row itself.
    """

    rows: StepInput
    row_of_line: Int64Array
    first_lines: Int64Array

    @classmethod
    def of(cls, step: StepInput, drafts: TokenRuns) -> _DraftedStep:
        """Builds the step of lines; `step` itself has no drafts any more."""
        assert step.awaited is None, "a step with drafts begins only when no other step runs"
        counts = drafts.counts
        row_of_line = np.repeat(np.arange(step.num_rows), counts + 1)
        first_lines = np.concatenate([[0], np.cumsum(counts + 1)[:-1]])
        is_draft = np.ones(len(row_of_line), np.bool_)
        is_draft[first_lines] = False
        rows = replace(
            step,
            row_ids=_row_ids(step, row_of_line, is_draft),
            num_computed_tokens=_positions(step, row_of_line, first_lines),
            num_new_tokens=np.where(is_draft, 1, step.num_new_tokens[row_of_line]).astype(np.int32),
            token_ids=_token_ids(step, drafts),
            samples=step.samples[row_of_line],
            block_tables=step.block_tables[row_of_line],
            follows=is_draft,
            # Tables go by row id, and draft lines have no row id.
            tables=None,
            num_prompt_tokens=step.num_prompt_tokens[row_of_line],
            seeds=step.seeds[row_of_line],
            sampling_params=step.sampling_params.take(row_of_line),
            histories=(histories := _histories(step, drafts)),
            adapters=[step.adapters[row] for row in row_of_line.tolist()] if step.adapters else (),
            cross=None if step.cross is None else _cross(step.cross, row_of_line, is_draft),
            grammars=None
            if step.grammars is None
            else step.grammars.drafted(row_of_line, histories),
        )
        return cls(rows, row_of_line, first_lines)

    def taken(self, output: StepOutput) -> StepOutput:
        """Converts `output` of the lines to the output of the step, with the accepted tokens."""
        is_taken = self._is_taken(output)
        counts = np.bincount(self.row_of_line[is_taken], minlength=len(self.first_lines))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = output.sampled_token_ids[is_taken]
        last = np.full(len(counts), -1, np.int32)
        last[counts > 0] = tokens[offsets[1:][counts > 0] - 1]
        row_of_line = self.row_of_line.tolist()
        first_lines = set(self.first_lines.tolist())
        return replace(
            output,
            row_statuses=output.row_statuses[self.first_lines],
            sampled_token_ids=last,
            row_errors={
                row_of_line[line]: text
                for line, text in output.row_errors.items()
                if line in first_lines
            },
            logprobs=self._of_rows(output.logprobs, is_taken),
            prompt_logprobs=self._of_rows(output.prompt_logprobs, None),
            runs=TokenRuns(offsets, tokens),
        )

    def _is_taken(self, output: StepOutput) -> BoolArray:
        """Returns which lines have a token that is accepted, [L]."""
        rows, tokens = self.rows, output.sampled_token_ids
        is_taken: BoolArray = (output.row_statuses == RowStatus.OK) & (tokens >= 0)
        inputs = rows.token_ids[np.cumsum(rows.num_new_tokens) - 1]
        is_first = np.zeros(len(tokens), np.bool_)
        is_first[self.first_lines] = True
        # A draft token is accepted if it equals the token sampled before it, and that token does
        # not end the row.
        for line in np.flatnonzero(~is_first & is_taken).tolist():
            before = int(tokens[line - 1])
            is_taken[line] = (
                is_taken[line - 1]
                and before == inputs[line]
                and before not in rows.sampling_params[line].stop_token_ids
            )
        return is_taken

    def _of_rows(
        self, columns: LogprobColumns | None, is_kept: BoolArray | None
    ) -> LogprobColumns | None:
        if columns is not None and is_kept is not None:
            columns = join_columns([columns], is_kept)
        if columns is None:
            return None
        row_indexes = self.row_of_line[columns.row_indexes].astype(np.int32)
        return replace(columns, row_indexes=row_indexes)


def _fewer(drafts: TokenRuns) -> TokenRuns:
    """Shortens the longest drafts so that at most MAX_NUM_DRAFTS draft tokens are left."""
    if len(drafts.token_ids) <= MAX_NUM_DRAFTS:
        return drafts
    counts = np.sort(drafts.counts)
    lengths = np.arange(counts[-1] + 1)
    totals = np.array([np.minimum(counts, length).sum() for length in lengths.tolist()])
    most = lengths[totals <= MAX_NUM_DRAFTS][-1]
    return drafts.shortened(np.full(len(counts), most, np.int32))


def _row_ids(step: StepInput, row_of_line: Int64Array, is_draft: BoolArray) -> Int32Array:
    """Returns the row ids of all lines, [L]; draft lines get ids that no row of the step has."""
    row_ids = step.row_ids[row_of_line]
    num_drafts = np.count_nonzero(is_draft)
    row_ids[is_draft] = int(step.row_ids.max()) + 1 + np.arange(num_drafts)
    return row_ids


def _token_ids(step: StepInput, drafts: TokenRuns) -> Int32Array:
    """Returns the input tokens of all lines: those of each row, then its draft tokens."""
    num_drafts = len(drafts.token_ids)
    draft_indexes = np.cumsum(step.num_new_tokens).repeat(drafts.counts) + np.arange(num_drafts)
    token_ids = np.empty(len(step.token_ids) + num_drafts, np.int32)
    is_input = np.ones(len(token_ids), np.bool_)
    is_input[draft_indexes] = False
    token_ids[draft_indexes], token_ids[is_input] = drafts.token_ids, step.token_ids
    return token_ids


def _positions(step: StepInput, row_of_line: Int64Array, first_lines: Int64Array) -> Int32Array:
    """Returns the position at which the input of each line begins, [L]."""
    ends = step.num_computed_tokens + step.num_new_tokens
    positions = (ends - first_lines - 1)[row_of_line] + np.arange(len(row_of_line))
    positions[first_lines] = step.num_computed_tokens
    return positions.astype(np.int32)


def _histories(step: StepInput, drafts: TokenRuns) -> list[list[int] | None]:
    """Returns L histories; the history of a draft line ends with its draft token."""
    histories: list[list[int] | None] = []
    ends = (step.num_computed_tokens + step.num_new_tokens).tolist()
    for history, end, tokens in zip(step.histories, ends, drafts.rows, strict=True):
        histories.append(history)
        if history is None:
            histories += [None] * len(tokens)
        else:
            known = history[:end]
            histories += [known + tokens[: index + 1] for index in range(len(tokens))]
    return histories


def _cross(cross: CrossInput, row_of_line: Int64Array, is_draft: BoolArray) -> CrossInput:
    """Returns the cross attention input of all lines; only a row's own line encodes."""
    return CrossInput(
        cross.num_encoder_tokens[row_of_line],
        cross.block_tables[row_of_line],
        [
            _NO_TOKENS if is_here else cross.encoder_inputs[row]
            for row, is_here in zip(row_of_line.tolist(), is_draft.tolist(), strict=True)
        ],
    )


# -- Rows that run on, as turns --------------------------------------------------------------------
#
# A turn is a step of its own, whose input is the token that each row sampled last. The first turn
# computes the input and the draft tokens.
#
# Every runner can run turns, with every row. A runner that produces several tokens at once produces
# the same ones; it takes over the rest of a step as soon as it can serve all remaining rows. Rows
# that it cannot serve are not separated from those that it can: a turn reads the weights once for
# all rows, two parts would read them twice.
#
# Shape letters: R rows of the step, K rows of a turn.


# `Execute` runs a step of one turn. `ExecuteRun` runs any step and may produce as many as it likes
# of the tokens that the rows may get; it returns None for a step that it does not serve.
Execute = Callable[[StepInput], StepOutput]
ExecuteRun = Callable[[StepInput], StepOutput | None]


def run_on(
    step: StepInput, execute: Execute, execute_run: ExecuteRun = lambda _: None
) -> StepOutput:
    """Runs `step` by `execute_run`, or as turns by `execute`.

    Appends to the histories all tokens of each row but the last. Raises what the first turn raises.
    A later turn that fails, for all rows or for one, ends these rows with the tokens they have. So
    does the watch of the step, which gets the tokens after each turn that is not the last.
    """
    ran = execute_run(step)
    if ran is not None and _is_all(step, ran):
        return ran
    turns = _Turns(step, verify_drafts(step, execute) if ran is None else ran, ran is not None)
    try:
        while len(rows := turns.running) and turns.may_go_on():
            left = turns.next_turn(rows)
            ran = execute_run(left)
            turns.take(rows, verify_drafts(left, execute) if ran is None else ran)
    except ExecutorError:
        _log.exception("run_cut_short step_id=%d", step.step_id)
    return turns.output


class _Turns:
    """Tokens and scores that the rows have got so far. `output`: as the output of one step."""

    def __init__(self, step: StepInput, first: StepOutput, has_run: bool) -> None:
        """Starts with `first`, the output of the first turn.

        `has_run`: whether `first` comes from a runner that runs on, and not from draft tokens
        alone.
        """
        assert step.num_run_on_tokens is not None, "the step has run-on rows"
        self._step = step
        self._first = first
        # Where the next token of each row is written: after its input.
        self._next_positions: Int32Array = step.num_computed_tokens + step.num_new_tokens
        self._num_left: Int32Array = step.num_run_on_tokens.copy()
        self._last: Int32Array = first.sampled_token_ids.copy()
        self._tokens: list[list[int]] = [[] for _ in range(step.num_rows)]
        self._scores: list[LogprobColumns] = []
        self._durations_us = np.array([first.move_us, first.forward_us, first.sample_us])
        self._keep(np.arange(step.num_rows), first, has_run)

    @property
    def running(self) -> Int64Array:
        """Returns the rows that get another token."""
        return np.flatnonzero(self._num_left > 0)

    def next_turn(self, rows: Int64Array) -> StepInput:
        """Returns the step that gives `rows` [K] one more token, and may give further ones."""
        positions = self._next_positions[rows]
        for row in rows.tolist():
            self._write(row, int(self._last[row]))
        self._num_left[rows] -= 1
        ones = np.ones(len(rows), np.int32)
        turn = part_of(
            self._step,
            rows,
            num_computed_tokens=positions,
            num_new_tokens=ones,
            token_ids=self._last[rows],
            samples=ones.astype(np.bool_),
        )
        watch = None if self._step.watch is None else partial(self.may_go_on, rows)
        return replace(turn, num_run_on_tokens=self._num_left[rows], watch=watch)

    def may_go_on(self, rows: Int64Array = _NO_ROWS, further: TokenRuns = _NO_RUNS) -> bool:
        """Shows all tokens to the watch of the step; returns whether rows may get more.

        `further`: tokens that `rows` [K] have got in a turn that goes on.
        """
        if self._step.watch is None:
            return True
        tokens = self._tokens.copy()
        for row, of_row in zip(rows.tolist(), further.rows, strict=True):
            tokens[row] = tokens[row] + of_row
        return self._step.watch(TokenRuns.of(tokens))

    def _write(self, row: int, token_id: int) -> None:
        """Records `token_id` as the next input token of the row."""
        append_to_history(self._step, row, int(self._next_positions[row]), token_id)
        self._next_positions[row] += 1

    def take(self, rows: Int64Array, output: StepOutput) -> None:
        """Adds the output of a turn for `rows` [K]."""
        self._durations_us += (output.move_us, output.forward_us, output.sample_us)
        self._keep(rows, output, has_run=True)

    def _keep(self, rows: Int64Array, output: StepOutput, has_run: bool) -> None:
        """Adds tokens and scores; ends rows that got no token or end with a stop token."""
        is_ok = output.row_statuses == RowStatus.OK
        for index, row in enumerate(rows.tolist()):
            tokens = output.token_ids_of(index)
            if not is_ok[index] or not tokens:
                self._num_left[row] = 0
                continue
            for token_id in tokens[:-1]:
                self._write(row, token_id)
            if has_run:
                self._num_left[row] -= len(tokens) - 1
            self._tokens[row] += tokens
            self._last[row] = tokens[-1]
            if tokens[-1] in self._step.sampling_params[row].stop_token_ids:
                self._num_left[row] = 0
        if output.logprobs is not None:
            row_indexes = rows[output.logprobs.row_indexes].astype(np.int32)
            self._scores.append(replace(output.logprobs, row_indexes=row_indexes))

    @property
    def output(self) -> StepOutput:
        move_us, forward_us, sample_us = self._durations_us.tolist()
        has_tokens = np.array([bool(tokens) for tokens in self._tokens], np.bool_)
        return replace(
            self._first,
            sampled_token_ids=np.where(has_tokens, self._last, -1).astype(np.int32),
            runs=TokenRuns.of(self._tokens),
            logprobs=join_columns(self._scores, has_tokens),
            move_us=move_us,
            forward_us=forward_us,
            sample_us=sample_us,
        )


def _is_all(step: StepInput, ran: StepOutput) -> bool:
    """Returns whether each row got its maximal number of tokens."""
    assert step.num_run_on_tokens is not None, "the step has run-on rows"
    return ran.runs is not None and np.array_equal(ran.runs.counts, step.num_run_on_tokens + 1)


def append_to_history(step: StepInput, row: int, position: int, token_id: int) -> None:
    """Appends `token_id` at `position` to the history of the row, unless the history has it."""
    history = step.histories[row]
    if history is not None and len(history) == position:
        history.append(token_id)
