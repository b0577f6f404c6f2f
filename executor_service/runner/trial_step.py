"""A step that is measured before serving, so that schedulers know what the first ones may take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from executor_service.errors import StepFailed
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.kernel_warm_up import make_step
from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.executor_info import TrialStep
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import RowStatus, StepInput, execute_step

# A part of a prompt. To a CPU more is work, and it is to start soon; to a GPU less is no work.
_NUM_TOKENS = 16
_NUM_TOKENS_OF_GPU = 256
# It follows so many, as long steps may attend to many more than they compute.
_NUM_COMPUTED = 2048
# What takes longer is not done once more for the sake of a better number.
_LONG_S = 0.5

_log = logging.getLogger(__name__)


def measure_step(
    runner: ModelRunner,
    loaded: LoadedModel,
    max_num_batched_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> TrialStep | None:
    """Runs a step on `runner`, whose pools nobody needs yet; None if it cannot be run.

    Twice, if it is short: the first time it may have to load something. `clock` is in seconds.
    """
    most = _NUM_TOKENS_OF_GPU if loaded.device.type == "cuda" else _NUM_TOKENS
    num_new = max(1, min(most, max_num_batched_tokens or most, loaded.max_model_len - 2))
    num_computed = min(_NUM_COMPUTED, loaded.max_model_len - 1 - num_new)
    step = _make_step(runner, loaded, num_new, num_computed)
    took_s = _run(runner, step, clock)
    if took_s is not None and took_s < _LONG_S:
        took_s = _run(runner, step, clock)
    if took_s is None:
        return None
    _log.info("trial_step_measured num_tokens=%d seconds=%.3g", num_new, took_s)
    num_attended = num_new * (num_new + num_computed)
    return TrialStep(num_new, num_attended, max(1, round(took_s * 1e6)))


def _make_step(
    runner: ModelRunner, loaded: LoadedModel, num_new: int, num_computed: int
) -> StepInput:
    """One row, all of whose tokens are in block 0."""
    step = make_step([num_new], SamplingParams(temperature=0.0), loaded.vocab_size, runner)
    width = -(-(num_computed + num_new) // runner.cache.block_size)
    return replace(
        step,
        num_computed_tokens=np.array([num_computed], np.int32),
        num_prompt_tokens=np.array([num_computed + num_new], np.int32),
        block_tables=np.zeros((1, width), np.int32),
    )


def _run(runner: ModelRunner, step: StepInput, clock: Callable[[], float]) -> float | None:
    started_s = clock()
    try:
        output = execute_step(runner, step)
    except StepFailed:
        return None
    took_s = clock() - started_s
    # Blocks that nobody has written may hold anything, NaN included; that takes no longer.
    return None if RowStatus.FAILED in output.row_statuses else took_s
