"""A runner that counts passes, and one sequence that it tells to the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import PendingStep, Runner, StepInput, execute_step
from tests.support.steps.step_driver import Row, make_step


@dataclass
class CountedRunner:
    """A runner, and how many passes it made. Time is these: guesses cost nothing."""

    runner: ModelRunner
    num_passes: int = 0

    def begin(self, step: StepInput) -> PendingStep | None:
        most = 0 if step.num_run_on_tokens is None else int(step.num_run_on_tokens.max())
        self.num_passes += 1 + most
        return self.runner.begin(step)

    def __call__(self) -> float:
        return float(self.num_passes)


def tell(
    runner: Runner,
    prompt: Sequence[int],
    params: SamplingParams,
    table: Sequence[int],
    max_num_tokens: int,
) -> list[int]:
    """What follows `prompt`, in steps of up to 8 tokens."""
    tokens, num_computed = list(prompt), 0
    while len(tokens) < max_num_tokens and tokens[-1] not in params.stop_token_ids:
        row = Row(tokens[num_computed:], num_computed, table, len(prompt), params=params, seed=4)
        most = min(7, max_num_tokens - len(tokens) - 1)
        step = replace(make_step([row]), num_run_on_tokens=np.array([most], np.int32))
        sampled = execute_step(runner, step).token_ids_of(0)
        num_computed = len(tokens) + len(sampled) - 1
        tokens += sampled
    return tokens[len(prompt) :]
