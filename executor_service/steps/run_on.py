"""A step whose rows run on, as turns: each is a step of its own, of what was sampled last.

The first turn is of the input, and of the drafts.

Every runner can do that, with every row. What does it in one go brings the same tokens.

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


def run_on(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
    """What becomes of `step` by turns, each of which is for `execute`.

    Histories of rows get all tokens but the last of each. Raises what the first turn raises; a
    later one that fails, of all rows or of one, ends what it was for before it.
    """
    first = verify_drafts(step, execute)
    turns = _Turns(step, first)
    try:
        while len(rows := turns.running):
            turns.take(rows, execute(turns.next_turn(rows)))
    except ExecutorError:
        _log.exception("run_cut_short step_id=%d", step.step_id)
    return turns.output


class _Turns:
    """What the rows have got so far. `output`: as that of one step."""

    def __init__(self, step: StepInput, first: StepOutput) -> None:
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
        self._keep(np.arange(step.num_rows), first)

    @property
    def running(self) -> Int64Array:
        """Rows that get another token."""
        return np.flatnonzero(self._num_left > 0)

    def next_turn(self, rows: Int64Array) -> StepInput:
        """The step that brings `rows` [K] one token more."""
        positions = self._next_positions[rows]
        for row in rows.tolist():
            self._write(row, int(self._last[row]))
        self._num_left[rows] -= 1
        ones = np.ones(len(rows), np.int32)
        return part_of(
            self._step,
            rows,
            num_computed_tokens=positions,
            num_new_tokens=ones,
            token_ids=self._last[rows],
            samples=ones.astype(np.bool_),
        )

    def _write(self, row: int, token_id: int) -> None:
        """The next token of the row that is input is that."""
        append_to_history(self._step, row, int(self._next_positions[row]), token_id)
        self._next_positions[row] += 1

    def take(self, rows: Int64Array, output: StepOutput) -> None:
        """What became of `rows` [K] in a turn."""
        self._durations_us += (output.move_us, output.forward_us, output.sample_us)
        self._keep(rows, output)

    def _keep(self, rows: Int64Array, output: StepOutput) -> None:
        """Takes tokens and scores; who has none, or one that ends it, runs no further."""
        is_ok = output.row_statuses == RowStatus.OK
        for index, (row, tokens) in enumerate(zip(rows.tolist(), tokens_of(output), strict=True)):
            if not is_ok[index] or not tokens:
                self._num_left[row] = 0
                continue
            for token_id in tokens[:-1]:
                self._write(row, token_id)
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


def tokens_of(output: StepOutput) -> list[list[int]]:
    """Of each row."""
    if output.runs is not None:
        return output.runs.rows
    return [[token] if token >= 0 else [] for token in output.sampled_token_ids.tolist()]


def append_to_history(step: StepInput, row: int, position: int, token_id: int) -> None:
    """The token at `position` is that, which the history of the row may have already."""
    history = step.histories[row]
    if history is not None and len(history) == position:
        history.append(token_id)
