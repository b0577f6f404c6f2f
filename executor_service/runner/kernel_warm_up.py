"""Warm-up before serving: steps that compile all forms of kernels, and one that is timed.

Triton compiles a kernel when it is first launched in some form: for other tile sizes, and for
strides and numbers that are 1 or multiples of 16. That takes up to a second, in which all steps
wait. The kernels' trials have shapes of their own; the steps here have those of the model and its
pools.

Shape letter: R rows of a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from executor_service.device import KVCache
from executor_service.errors import ModelUnsupported, StepFailed
from executor_service.model import Adapter, LoadedModel, slots_of
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.vectors import UncachedRunner
from executor_service.steps import (
    NO_MOVES,
    BlockMoves,
    BlockTables,
    CrossInput,
    EncoderInput,
    ParamRows,
    RowStatus,
    Runner,
    SamplingParams,
    StepInput,
    TrialStep,
    execute_step,
)
from splitserve_contract import EXAMPLES_OF_LIMITS

# Tiles of queries double with the tokens of the longest row, up to 128 tokens.
_NUM_NEW = (2, 3, 5, 9, 17, 33, 65, 129)
_NUM_DECODES = (1, 2, 3, 16, 17)
_NO_INPUT = np.empty(0, np.int32)
_ALL_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, **EXAMPLES_OF_LIMITS),
    SamplingParams(
        temperature=1.0,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 0.5},
        num_logprobs=2,
        num_prompt_logprobs=2,
    ),
)

_log = logging.getLogger(__name__)


def compile_kernels(
    runner: ModelRunner, loaded: LoadedModel, max_num_rows: int, max_num_batched_tokens: int
) -> None:
    """Runs steps on `runner` that compile all kernels. Overwrites its pools; limits of 0 mean none.

    Raises StepFailed if a step cannot be run.
    """
    started_s = time.perf_counter()
    most_tokens = min(loaded.max_model_len - 1, max_num_batched_tokens or loaded.max_model_len)
    most_rows = max_num_rows or max(_NUM_DECODES)
    small = [(new, each) for new in step_sizes(most_tokens, most_rows) for each in _ALL_PARAMS]
    full = [(new, _ALL_PARAMS[0]) for new in full_step_sizes(most_tokens, most_rows)]
    for num_new, params in small + full:
        step = make_step(num_new, params, loaded, runner)
        execute_step(runner, step)
    num_steps = len(small) + len(full)
    slots = slots_of(runner.model)
    if slots is not None:
        num_steps += 1
        _run_adapted(runner, loaded, slots.random_adapter(seed=0))
    seconds = time.perf_counter() - started_s
    _log.info("kernels_compiled num_steps=%d seconds=%.1f", num_steps, seconds)


def _run_adapted(runner: ModelRunner, loaded: LoadedModel, adapter: Adapter) -> None:
    """Runs a step whose row has `adapter`. Nothing about the rows makes other kernels of it."""
    step = make_step([1], _ALL_PARAMS[0], loaded, runner)
    before = runner.adapters.by_name
    runner.adapters.by_name = {adapter.name: adapter}
    try:
        execute_step(runner, replace(step, adapters=[adapter.name]))
    finally:
        runner.adapters.by_name = before


def step_sizes(most_tokens: int, most_rows: int) -> Iterator[list[int]]:
    """Yields the numbers of new tokens of each step's rows.

    There are decodes, single prompts, and prompts between two other rows.
    """
    for num_rows in _NUM_DECODES:
        if num_rows <= min(most_rows, most_tokens):
            yield [1] * num_rows
    for num_new in _NUM_NEW:
        if num_new <= most_tokens:
            yield [num_new]
        if most_rows >= 3 and num_new + 3 <= most_tokens:
            yield [1, num_new, 2]


def full_step_sizes(most_tokens: int, most_rows: int) -> Iterator[list[int]]:
    """Yields steps of prompts of all lengths that fill the device.

    Attention uses other kernels for these.
    """
    for num_new in _NUM_NEW:
        num_rows = min(most_rows, most_tokens // num_new)
        if num_rows > 1:
            yield [num_new] * num_rows


def make_step(
    num_new_tokens: list[int], params: SamplingParams, loaded: LoadedModel, runner: ModelRunner
) -> StepInput:
    """Builds a step whose rows follow one computed token, all in block 0. Its results mean nothing.

    Rows overwrite each other's tokens. If there is another block, it is copied to block 0 first. An
    encoder encodes one token, or silence.
    """
    num_rows, cache = len(num_new_tokens), runner.cache
    new, computed = np.array(num_new_tokens, np.int32), np.ones(num_rows, np.int32)
    width = -(-(int(new.max()) + 1) // cache.block_size)
    # The last scored token comes after the input.
    history = [0] * (int(new.max()) + 2)
    copy = NO_MOVES
    if cache.num_device_blocks > 1:
        copy = BlockMoves(np.array([1], np.int32), np.array([0], np.int32))
    tables = np.zeros((num_rows, width), np.int32)
    return StepInput(
        step_id=1,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=copy,
        row_ids=np.arange(num_rows, dtype=np.int32),
        num_computed_tokens=computed,
        num_new_tokens=new,
        token_ids=(np.arange(new.sum()) % loaded.vocab_size).astype(np.int32),
        samples=np.ones(num_rows, np.bool_),
        block_tables=tables,
        tables=BlockTables.of(tables),
        num_prompt_tokens=computed + new,
        seeds=np.arange(num_rows, dtype=np.int64),
        sampling_params=ParamRows.of([params] * num_rows),
        histories=[history if params.needs_history else None] * num_rows,
        cross=_least_encoder_input(num_rows, loaded, cache) if loaded.has_encoder else None,
        pooling=[] if loaded.vectors is None else [loaded.vectors.plain_params] * num_rows,
    )


def _least_encoder_input(num_rows: int, loaded: LoadedModel, cache: KVCache) -> CrossInput:
    """Returns one encoder token, or silence, that all rows attend to; all in block 0."""
    least: EncoderInput = np.zeros(1, np.int32)
    num_encoder_tokens = 1
    if loaded.audio is not None:
        num_encoder_tokens = loaded.audio.num_positions
        least = np.zeros(loaded.audio.num_mel_bins * loaded.audio.num_frames, np.float32)
    return CrossInput(
        num_encoder_tokens=np.full(num_rows, num_encoder_tokens, np.int32),
        block_tables=np.zeros((num_rows, -(-num_encoder_tokens // cache.block_size)), np.int32),
        encoder_inputs=[least, *[_NO_INPUT] * (num_rows - 1)],
    )


# -- Trial step, timed before serving --------------------------------------------------------------
#
# Schedulers estimate the first steps by it.

# A chunk of a prompt. On a CPU more tokens would delay the start; a GPU needs more to be busy.
_NUM_TOKENS = 16
_NUM_TOKENS_OF_GPU = 256
# Computed tokens before the chunk, as long steps may attend to many more than they compute.
_NUM_COMPUTED = 2048
# A step that takes longer is not repeated for a better number.
_LONG_S = 0.5


def measure_step(
    runner: ModelRunner,
    loaded: LoadedModel,
    max_num_batched_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> TrialStep | None:
    """Times a step on `runner` and returns it as TrialStep; None if the step cannot be run.

    Overwrites the pools. A short step runs twice: the first run may have to load something. `clock`
    is in seconds.
    """
    most = _NUM_TOKENS_OF_GPU if loaded.device.type == "cuda" else _NUM_TOKENS
    num_new = max(1, min(most, max_num_batched_tokens or most, loaded.max_model_len - 2))
    num_computed = min(_NUM_COMPUTED, loaded.max_model_len - 1 - num_new)
    step = _make_step(runner, loaded, num_new, num_computed)
    took_s = _run_shortly(runner, step, clock)
    if took_s is None:
        return None
    _log.info("trial_step_measured num_tokens=%d seconds=%.3g", num_new, took_s)
    num_attended = num_new * (num_new + num_computed)
    return TrialStep(num_new, num_attended, max(1, round(took_s * 1e6)))


def measure_uncached_step(
    runner: UncachedRunner,
    loaded: LoadedModel,
    clock: Callable[[], float] = time.perf_counter,
) -> TrialStep:
    """Times a step of one long row on `runner`.

    Raises ModelUnsupported if it fails: nothing depends on what a pool holds, so others would, too.
    """
    vectors = loaded.vectors
    assert vectors is not None, "the model returns vectors"
    num_tokens = min(_NUM_TOKENS_OF_GPU, loaded.max_model_len)
    none, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    step = StepInput(
        step_id=1,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=none,
        num_computed_tokens=none,
        num_new_tokens=num_tokens * one,
        token_ids=(np.arange(num_tokens) % loaded.vocab_size).astype(np.int32),
        samples=np.ones(1, np.bool_),
        block_tables=none[None],
        num_prompt_tokens=num_tokens * one,
        seeds=np.zeros(1, np.int64),
        sampling_params=ParamRows.of([SamplingParams()]),
        histories=[None],
        pooling=[vectors.plain_params],
    )
    took_s = _run_shortly(runner, step, clock)
    if took_s is None:
        reason = f"a text of {num_tokens} tokens cannot be computed (the log says why)"
        raise ModelUnsupported(f"{loaded.architecture}: {reason}")
    _log.info("trial_step_measured num_tokens=%d seconds=%.3g", num_tokens, took_s)
    return TrialStep(num_tokens, num_tokens**2, max(1, round(took_s * 1e6)))


def _make_step(
    runner: ModelRunner, loaded: LoadedModel, num_new: int, num_computed: int
) -> StepInput:
    """Builds a step of one row, all of whose tokens are in block 0; nothing is encoded."""
    step = make_step([num_new], SamplingParams(temperature=0.0), loaded, runner)
    width = -(-(num_computed + num_new) // runner.cache.block_size)
    return replace(
        step,
        num_computed_tokens=np.array([num_computed], np.int32),
        num_prompt_tokens=np.array([num_computed + num_new], np.int32),
        block_tables=np.zeros((1, width), np.int32),
        cross=None if step.cross is None else replace(step.cross, encoder_inputs=[_NO_INPUT]),
    )


def _run_shortly(runner: Runner, step: StepInput, clock: Callable[[], float]) -> float | None:
    """Returns the seconds of `step`, of its second run if it is short; None if it fails."""
    took_s = _run(runner, step, clock)
    return _run(runner, step, clock) if took_s is not None and took_s < _LONG_S else took_s


def _run(runner: Runner, step: StepInput, clock: Callable[[], float]) -> float | None:
    started_s = clock()
    try:
        output = execute_step(runner, step)
    except StepFailed:
        return None
    took_s = clock() - started_s
    # Unwritten blocks may hold anything, NaN included; invalid logits take no longer.
    return None if RowStatus.FAILED in output.row_statuses else took_s
