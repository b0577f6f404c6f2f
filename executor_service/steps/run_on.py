"""A step whose rows run on, as turns: each is a step of its own, of what was sampled last.

The first turn is of the input, and of the drafts.

Every runner can do that, with every row. What brings several tokens in one go brings the same ones;
it serves what is left of a step as soon as it can serve all rows that are left. Rows that it cannot
serve are not parted from those it can: a turn reads the weights once for all of them, two parts
would read them twice.

Shape letters: R rows of the step, K rows of a turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from executor_service.errors import ExecutorError
from executor_service.steps.drafts import verify_drafts
from executor_service.steps.step import (
    Int32Array,
    Int64Array,
    LogprobColumns,
    RowStatus,
    StepInput,
    StepOutput,
)
from executor_service.steps.step_parts import join_columns, part_of
from executor_service.steps.token_runs import TokenRuns

_log = logging.getLogger(__name__)


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
