"""Drafts of rows, verified in one pass: each of them is computed as a row of its own.

A draft is the only input token of such a row, which begins where the row before it ends, in the
same blocks. In every layer all writes come before any read, so it attends to the input and to the
drafts before it; it is computed, and sampled, as if the row had come there one token a step. What
goes wrong with one is no matter of those before it. A pass on a GPU may join a row and its drafts,
which says the same of all tokens, so that attention reads their keys once.

Shape letters: R rows of the step, D drafts, L rows of the pass: R and D.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

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

# Those of a step whose logits there may be: with 150 000 tokens in the vocabulary, 150 MB.
MAX_NUM_DRAFTS = 256
_NO_TOKENS = np.empty(0, np.int32)

_log = logging.getLogger(__name__)


def verify_drafts(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
    """What `step`, and its drafts with it, brings in one pass by `execute`; no row runs on.

    Of more than MAX_NUM_DRAFTS the last ones of rows are left out. If the pass fails, it is
    repeated without any: they may be why. Raises what that raises.
    """
    drafts, step = step.drafts, replace(step, drafts=None, num_run_on_tokens=None)
    if drafts is None or not len(drafts.token_ids):
        return execute(step)
    drafted = _DraftedStep.of(step, _fewer(drafts))
    try:
        output = execute(drafted.rows)
    except ExecutorError:
        if step.moves_blocks:
            # Nobody knows which of them were moved.
            raise
        _log.exception("drafts_left_out step_id=%d", step.step_id)
        return execute(step)
    return drafted.taken(output)


@dataclass(frozen=True, slots=True)
class _DraftedStep:
    """`rows`: the step whose rows are those of another, each followed by its drafts.

    `row_of_line`: [L], which row of the other each belongs to. `first_lines`: [R], where these are.
    """

    rows: StepInput
    row_of_line: Int64Array
    first_lines: Int64Array

    @classmethod
    def of(cls, step: StepInput, drafts: TokenRuns) -> _DraftedStep:
        """`step` has no drafts any more."""
        assert step.awaited is None, "whoever takes several tokens a step begins when it is alone"
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
            # By row ids, which drafts have none of.
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
        """`output` of the lines as that of the step: its tokens are those that are taken."""
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
        """[L]; whether the token of a line is one of the step."""
        rows, tokens = self.rows, output.sampled_token_ids
        is_taken: BoolArray = (output.row_statuses == RowStatus.OK) & (tokens >= 0)
        inputs = rows.token_ids[np.cumsum(rows.num_new_tokens) - 1]
        is_first = np.zeros(len(tokens), np.bool_)
        is_first[self.first_lines] = True
        # A draft counts if it is what was taken before it, and that is not the end.
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
    """At most MAX_NUM_DRAFTS of them: the longest are shortened."""
    if len(drafts.token_ids) <= MAX_NUM_DRAFTS:
        return drafts
    counts = np.sort(drafts.counts)
    lengths = np.arange(counts[-1] + 1)
    totals = np.array([np.minimum(counts, length).sum() for length in lengths.tolist()])
    most = lengths[totals <= MAX_NUM_DRAFTS][-1]
    return drafts.shortened(np.full(len(counts), most, np.int32))


def _row_ids(step: StepInput, row_of_line: Int64Array, is_draft: BoolArray) -> Int32Array:
    """[L]; drafts have ids that no row of the step has."""
    row_ids = step.row_ids[row_of_line]
    num_drafts = np.count_nonzero(is_draft)
    row_ids[is_draft] = int(step.row_ids.max()) + 1 + np.arange(num_drafts)
    return row_ids


def _token_ids(step: StepInput, drafts: TokenRuns) -> Int32Array:
    """Of all lines, the drafts of each row behind its input."""
    num_drafts = len(drafts.token_ids)
    places = np.cumsum(step.num_new_tokens).repeat(drafts.counts) + np.arange(num_drafts)
    token_ids = np.empty(len(step.token_ids) + num_drafts, np.int32)
    is_input = np.ones(len(token_ids), np.bool_)
    is_input[places] = False
    token_ids[places], token_ids[is_input] = drafts.token_ids, step.token_ids
    return token_ids


def _positions(step: StepInput, row_of_line: Int64Array, first_lines: Int64Array) -> Int32Array:
    """Where the input of each line begins, [L]."""
    ends = step.num_computed_tokens + step.num_new_tokens
    positions = (ends - first_lines - 1)[row_of_line] + np.arange(len(row_of_line))
    positions[first_lines] = step.num_computed_tokens
    return positions.astype(np.int32)


def _histories(step: StepInput, drafts: TokenRuns) -> list[list[int] | None]:
    """L long; that of a draft ends with it."""
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
    """Of each line; what is to be encoded, the row itself brings."""
    return CrossInput(
        cross.num_encoder_tokens[row_of_line],
        cross.block_tables[row_of_line],
        [
            _NO_TOKENS if is_here else cross.encoder_token_ids[row]
            for row, is_here in zip(row_of_line.tolist(), is_draft.tolist(), strict=True)
        ],
    )


# -- A step whose rows run on, as turns: each is a step of its own, of what was sampled last -------
#
# The first turn is of the input, and of the drafts.
#
# Every runner can do that, with every row. What brings several tokens in one go brings the same
# ones; it serves what is left of a step as soon as it can serve all rows that are left. Rows that
# it cannot serve are not parted from those it can: a turn reads the weights once for all of them,
# two parts would read them twice.
#
# Shape letters: R rows of the step, K rows of a turn.


# What becomes of a step of one turn; and of any step, with as many as it likes of the tokens that
# its rows may get, None if it does not serve such a one.
Execute = Callable[[StepInput], StepOutput]
ExecuteRun = Callable[[StepInput], StepOutput | None]


def run_on(
    step: StepInput, execute: Execute, execute_run: ExecuteRun = lambda _: None
) -> StepOutput:
    """What becomes of `step`: by `execute_run`, or by turns, each of which is for `execute`.

    Histories of rows get all tokens but the last of each. Raises what the first turn raises; a
    later one that fails, of all rows or of one, ends what it was for before it.
    """
    ran = execute_run(step)
    if ran is not None and _is_all(step, ran):
        return ran
    turns = _Turns(step, verify_drafts(step, execute) if ran is None else ran, ran is not None)
    try:
        while len(rows := turns.running):
            left = turns.next_turn(rows)
            ran = execute_run(left)
            turns.take(rows, verify_drafts(left, execute) if ran is None else ran)
    except ExecutorError:
        _log.exception("run_cut_short step_id=%d", step.step_id)
    return turns.output


class _Turns:
    """What the rows have got so far. `output`: as that of one step."""

    def __init__(self, step: StepInput, first: StepOutput, has_run: bool) -> None:
        """`has_run`: whether what `first` brought was by running on, and not by drafts alone."""
        assert step.num_run_on_tokens is not None, "a step whose rows run on"
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
        """Rows that get another token."""
        return np.flatnonzero(self._num_left > 0)

    def next_turn(self, rows: Int64Array) -> StepInput:
        """The step that brings `rows` [K] one token more, and then what they still may get."""
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
        return replace(turn, num_run_on_tokens=self._num_left[rows])

    def _write(self, row: int, token_id: int) -> None:
        """The next token of the row that is input is that."""
        append_to_history(self._step, row, int(self._next_positions[row]), token_id)
        self._next_positions[row] += 1

    def take(self, rows: Int64Array, output: StepOutput) -> None:
        """What became of `rows` [K] in a turn."""
        self._durations_us += (output.move_us, output.forward_us, output.sample_us)
        self._keep(rows, output, has_run=True)

    def _keep(self, rows: Int64Array, output: StepOutput, has_run: bool) -> None:
        """Takes tokens and scores; who has none, or one that ends it, runs no further."""
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
    """Whether all rows have got all that they may."""
    assert step.num_run_on_tokens is not None, "a step whose rows run on"
    return ran.runs is not None and np.array_equal(ran.runs.counts, step.num_run_on_tokens + 1)


def append_to_history(step: StepInput, row: int, position: int, token_id: int) -> None:
    """The token at `position` is that, which the history of the row may have already."""
    history = step.histories[row]
    if history is not None and len(history) == position:
        history.append(token_id)
