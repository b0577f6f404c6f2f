"""A runner that some requests harm, told by their seeds: what a bad kernel or device would do."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from executor_service.steps import (
    Int32Array,
    PendingStep,
    RowStatus,
    Runner,
    StepAnswer,
    StepInput,
    StepOutput,
)

Rows = npt.NDArray[np.intp]
# One of its rows has tokens that no vocabulary has; its process dies; its logits are no numbers.
OUT_OF_RANGE_SEED, DEADLY_SEED, NOT_A_NUMBER_SEED = 701, 702, 703
HARMFUL_SEEDS = (OUT_OF_RANGE_SEED, DEADLY_SEED, NOT_A_NUMBER_SEED)
# Output tokens that such a row gets before the harm is done.
NUM_HARMLESS_TOKENS = 8
_NO_TOKEN_OF_ANY = 2**31 - 1


class Sickness(Enum):
    """What becomes of every step of an executor: it fails, or its logits are no numbers."""

    STEPS_FAIL = "steps fail"
    NO_NUMBERS = "no numbers"


@dataclass(frozen=True, slots=True)
class RiggedRunner:
    """Computes as `runner` does, as long as no row is harmful, and there is no file `sickness`.

    `garbled`: rows, by step, whose answer is to have a token that there is not. Of the latest step
    with this id: another scheduler numbers its own steps.
    """

    runner: Runner
    sickness: Path
    garbled: dict[int, Rows] = field(default_factory=dict)

    def begin(self, step: StepInput) -> PendingStep | None:
        harmful = _rows_that_harm(step)
        self.garbled[step.step_id] = harmful[step.seeds[harmful] == OUT_OF_RANGE_SEED]
        sickness = self._sickness()
        if sickness is Sickness.STEPS_FAIL:
            raise RuntimeError("the device is broken")
        if DEADLY_SEED in step.seeds[harmful]:
            os.kill(os.getpid(), signal.SIGKILL)
        pending = self.runner.begin(step)
        if pending is not None and sickness is Sickness.NO_NUMBERS:
            return _WithoutNumbers(pending, np.flatnonzero(step.samples))
        if pending is None or not harmful.size:
            return pending
        return _WithoutNumbers(pending, harmful[step.seeds[harmful] == NOT_A_NUMBER_SEED])

    def _sickness(self) -> Sickness | None:
        try:
            return Sickness(self.sickness.read_text())
        except FileNotFoundError:
            return None

    def answer(self, answer: StepAnswer) -> StepAnswer:
        """What the scheduler is told in its place; the executor itself goes on with the truth."""
        garbled = self.garbled.get(answer.step_id)
        if answer.output is None or garbled is None or not garbled.size:
            return answer
        tokens = answer.output.sampled_token_ids.copy()
        tokens[garbled] = _NO_TOKEN_OF_ANY
        return replace(answer, output=replace(answer.output, sampled_token_ids=tokens))


def _rows_that_harm(step: StepInput) -> Rows:
    num_tokens = step.num_computed_tokens + step.num_new_tokens
    is_due = num_tokens >= step.num_prompt_tokens + NUM_HARMLESS_TOKENS
    return np.flatnonzero(np.isin(step.seeds, HARMFUL_SEEDS) & is_due & step.samples)


@dataclass(frozen=True, slots=True)
class _WithoutNumbers:
    """The logits of `rows` are NaN."""

    pending: PendingStep
    rows: Rows

    @property
    def is_done(self) -> bool:
        return self.pending.is_done

    @property
    def num_more_tokens(self) -> Int32Array | None:
        return self.pending.num_more_tokens

    def wait(self) -> None:
        self.pending.wait()

    def finish(self) -> StepOutput:
        output = self.pending.finish()
        statuses, tokens = output.row_statuses.copy(), output.sampled_token_ids.copy()
        statuses[self.rows], tokens[self.rows] = RowStatus.INVALID_LOGITS, -1
        return replace(output, row_statuses=statuses, sampled_token_ids=tokens)
