"""A runner whose rows run on by guesses: several tokens are verified in one pass of the model.

What rows may get by running on (`num_run_on_tokens`) they get in fewer passes, or by `runner` alone
where guesses would not pay. Tokens are those of the runner alone; how many come in how much time
is the speculation's.

Shape letter: K rows of a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from executor_service.speculation.draft_lengths import DraftLengths, Luck
from executor_service.speculation.draft_totals import DraftTotals
from executor_service.speculation.proposer import Proposer
from executor_service.speculation.row_states import RowStates
from executor_service.steps.drafts import verify_drafts
from executor_service.steps.run_on import run_on
from executor_service.steps.step import (
    FinishedStep,
    Int32Array,
    PendingStep,
    Runner,
    StepInput,
    StepOutput,
    execute_step,
)
from executor_service.steps.token_runs import TokenRuns


class SpeculatingRunner:
    """The Runner. `runner` computes, where a step is over when it has begun."""

    def __init__(
        self,
        runner: Runner,
        proposer: Proposer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: in seconds."""
        self._runner = runner
        self._proposer = proposer
        self._clock = clock
        self.totals = DraftTotals()
        self._lengths = DraftLengths()
        self._luck = RowStates(lambda _position: Luck())

    def begin(self, step: StepInput) -> PendingStep | None:
        self._proposer.catch_up()
        if step.num_run_on_tokens is not None and step.drafts is None:
            return FinishedStep(run_on(step, self._execute, self._take_turn))
        pending = self._runner.begin(step)
        if pending is not None and step.num_run_on_tokens is None:
            self._proposer.follow(step, None)
        elif pending is not None:
            output = pending.finish()
            self._proposer.follow(step, output.runs)
            return FinishedStep(output)
        return pending

    def _execute(self, step: StepInput) -> StepOutput:
        return execute_step(self._runner, step)

    def _take_turn(self, turn: StepInput) -> StepOutput:
        """Brings rows some of what they may get, each one token at least if it can."""
        luck = [self._luck.of(turn, index) for index in range(turn.num_rows)]
        lengths = self._lengths.choose(luck, _most_guesses(turn))
        if lengths.any():
            self._proposer.prepare(turn, lengths)
            started_s = self._clock()
            guesses = self._proposer.propose(turn, lengths)
            proposed_s = self._clock()
            if len(guesses.token_ids):
                output = verify_drafts(replace(turn, drafts=guesses), self._execute)
                self._learn(luck, guesses, output)
                counts = guesses.counts
                self._lengths.guessing.add(int(counts.max()), proposed_s - started_s)
                num_tokens = len(turn.token_ids) + int(counts.sum())
                self._lengths.verifying.add(num_tokens, self._clock() - proposed_s)
                self._proposer.follow(turn, output.runs)
                return output
        return self._go_on_alone(turn, luck)

    def _go_on_alone(self, turn: StepInput, luck: list[Luck]) -> StepOutput:
        started_s = self._clock()
        output = self._execute(turn)
        elapsed_s = self._clock() - started_s
        if output.runs is not None and (num_passes := int(output.runs.counts.max(initial=0))):
            self._lengths.plain.add(len(turn.token_ids), elapsed_s / num_passes)
        self._lengths.fade()
        for each in luck:
            each.fade()
        self._proposer.follow(turn, output.runs)
        return output

    def _learn(self, luck: list[Luck], guesses: TokenRuns, output: StepOutput) -> None:
        for index, (row, num_guesses) in enumerate(zip(luck, guesses.counts.tolist(), strict=True)):
            if num_guesses:
                num_right = max(0, len(output.token_ids_of(index)) - 1)
                self.totals.add(num_guesses, num_right)
                row.add(num_guesses, num_right)
                self._lengths.all_rows.add(num_guesses, num_right)


def _most_guesses(turn: StepInput) -> Int32Array:
    """[K]; rows that compute a prompt get none."""
    assert turn.num_run_on_tokens is not None, "a step whose rows run on"
    can_be_guessed = turn.samples & (turn.num_new_tokens == 1)
    return np.where(can_be_guessed, turn.num_run_on_tokens, 0).astype(np.int32)
