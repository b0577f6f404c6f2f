"""Runners of random models, and how long their steps take."""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_check.backends import flash_attention_3_source
from benchmarks.gpu_check.models import load_random
from benchmarks.gpu_check.problems import fill_randomly
from benchmarks.gpu_check.sizes import ModelShape, Rows, Sizes
from benchmarks.gpu_check.steps import GREEDY, grown, make_step
from benchmarks.gpu_check.timing import now_s
from executor_service.backends import Compute, choose_compute
from executor_service.device import block_bytes
from executor_service.errors import StepFailed
from executor_service.model import unbind
from executor_service.runner import CacheConfig, ModelRunner, RecordedModels, build_runner
from executor_service.steps import (
    AwaitedTokens,
    BlockTables,
    PendingStep,
    SamplingParams,
    StepInput,
)

_DEPTH = 2
_NUM_WARM_UPS = 3
_MOST_STEPS = 100
# Of what is free once the weights are there; the rest is for steps and recordings.
_POOL_SHARE = 0.8

StepAt = Callable[[int], StepInput]


def load(shape: ModelShape, sizes: Sizes) -> Compute:
    """A random model and what computes it best here."""
    release_models()
    return choose_compute(
        partial(load_random, shape, sizes),
        sizes.backend,
        None,
        flash_attention_3=flash_attention_3_source(),
    )


def release_models() -> None:
    """Gives back the memory of those that nobody uses any more."""
    gc.collect()  # models hold themselves
    torch.cuda.empty_cache()


def recorded_models(compute: Compute, most_rows: int, sizes: Sizes) -> RecordedModels:
    """What records the steps of `compute` as an executor has them recorded."""
    return RecordedModels(
        compute.make_model, most_rows, sizes.num_prompt_tokens, compute.static_draw
    )


@contextmanager
def runner_of(
    compute: Compute,
    num_blocks: int,
    most_rows: int,
    sizes: Sizes,
    *,
    is_recorded: bool,
    num_host_blocks: int = 0,
) -> Iterator[ModelRunner]:
    """With `num_blocks`, or as many as fit; its pools hold random numbers."""
    make = compute.make_model
    if is_recorded:
        make = recorded_models(compute, most_rows, sizes).make
    config = CacheConfig(
        compute.block_size,
        min(num_blocks, _num_fitting_blocks(compute)),
        num_host_blocks=num_host_blocks,
        copy_blocks=compute.copy_blocks,
    )
    runner = build_runner(compute.loaded, config, make, compute.draw, adjust=compute.adjust)
    for pool in (*runner.cache.key_pools, *runner.cache.value_pools):
        fill_randomly(pool)
    try:
        yield runner
    finally:
        # The modules would keep the pools until the next ones are there.
        unbind(compute.loaded.attention_modules)


def _num_fitting_blocks(compute: Compute) -> int:
    loaded = compute.loaded
    if loaded.device.type != "cuda":
        return 2**20
    free, _ = torch.cuda.mem_get_info(loaded.device)
    size = block_bytes(loaded.layers, compute.block_size, loaded.kv_dtype)
    return int(free * _POOL_SHARE) // size


def steps_of(runner: ModelRunner, rows: Rows, params: SamplingParams = GREEDY) -> StepAt:
    """The step of each number below _MOST_STEPS, decodes growing by a token each.

    As a scheduler's: the same tables and histories in all of them.
    """
    cache = runner.cache
    last = make_step(grown(rows, _MOST_STEPS), cache.block_size, cache.num_device_blocks, params)
    tables = BlockTables.of(last.block_tables)

    def step(index: int) -> StepInput:
        made = make_step(
            grown(rows, index), cache.block_size, cache.num_device_blocks, params, index + 1
        )
        width = made.block_tables.shape[1]
        return replace(
            made,
            histories=last.histories,
            block_tables=np.ascontiguousarray(last.block_tables[:, :width]),
            tables=tables,
        )

    return step


def pipelined_s(runner: ModelRunner, step_at: StepAt, num_steps: int) -> float:
    """Seconds a step. Each is fed what the one before it sampled, which need not be over."""
    pending: deque[PendingStep] = deque()
    try:
        return _pipelined_s(runner, step_at, num_steps, pending)
    finally:
        # After what was raised, the next to be measured finds a runner that is idle.
        while pending:
            with suppress(StepFailed):
                pending.popleft().finish()


def _pipelined_s(
    runner: ModelRunner, step_at: StepAt, num_steps: int, pending: deque[PendingStep]
) -> float:
    device, started = runner.cache.device, 0.0
    num_warm_ups = min(_NUM_WARM_UPS, num_steps)
    # Made before: it is the runner that is timed.
    steps = [step_at(index) for index in range(num_warm_ups + num_steps)]
    for index, step in enumerate(steps):
        if index == num_warm_ups:
            _finish(pending, 0)
            started = now_s(device)
        while pending and pending[0].is_done:
            _finish(pending, len(pending) - 1)
        begun = runner.begin(awaiting(step) if pending else step)
        if begun is None:  # it has to know what the others sampled
            _finish(pending, 0)
            begun = runner.begin(step)
        assert begun is not None, "all earlier steps are finished"
        pending.append(begun)
        _finish(pending, _DEPTH - 1)
    _finish(pending, 0)
    return (now_s(device) - started) / num_steps


def awaiting(step: StepInput) -> StepInput:
    """Its decodes go on with what the step before samples for them."""
    rows = np.flatnonzero(step.num_new_tokens == 1)
    if not len(rows):
        return step
    return replace(step, awaited=AwaitedTokens(rows, np.full(len(rows), step.step_id - 1)))


def _finish(pending: deque[PendingStep], num_left: int) -> None:
    while len(pending) > num_left:
        output = pending.popleft().finish()
        if output.row_errors:
            raise RuntimeError(f"rows failed: {next(iter(output.row_errors.values()))}")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians in seconds, of steps one at a time. `gap_s`: what a step took beside its parts."""

    wall_s: float
    forward_s: float
    sample_s: float

    @property
    def gap_s(self) -> float:
        """Nobody computes."""
        return self.wall_s - self.forward_s - self.sample_s


def step_times(runner: ModelRunner, step_at: StepAt, num_steps: int) -> StepTimes:
    """Each step begins when the one before it is over."""
    walls, outputs = [], []
    num_warm_ups = min(_NUM_WARM_UPS, num_steps)
    for index in range(num_warm_ups + num_steps):
        step = step_at(index)
        started = now_s(runner.cache.device)
        outputs.append(runner.execute(step))
        walls.append(now_s(runner.cache.device) - started)
    timed = outputs[num_warm_ups:]
    return StepTimes(
        wall_s=statistics.median(walls[num_warm_ups:]),
        forward_s=statistics.median(output.forward_us for output in timed) / 1e6,
        sample_s=statistics.median(output.sample_us for output in timed) / 1e6,
    )
