"""Whole steps of random models: our runner, `transformers`' generate, and what memory allows."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.models import (
    decode_bytes,
    decode_flops,
    load_random,
    make_model,
    prompt_flops,
)
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import ModelShape, Sizes
from benchmarks.gpu_check.speed import copy_bandwidth, matrix_flops
from benchmarks.gpu_check.timing import now_s
from executor_service.backends.choose import choose_compute
from executor_service.backends.compute import Compute
from executor_service.device.kv_cache import block_bytes
from executor_service.model.transformers_attention import unbind
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.runner.recorded_models import RecordedModels
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from executor_service.steps.step import NO_MOVES, StepInput, StepOutput

_NUM_WARM_UPS = 3
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians in seconds. `gap_s`: what the step took beside its parts."""

    wall_s: float
    move_s: float
    forward_s: float
    sample_s: float

    @property
    def gap_s(self) -> float:
        return self.wall_s - self.move_s - self.forward_s - self.sample_s


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Bytes of weights that a step of decodes reads; operations of a row of it, and of a prompt."""

    decode_bytes: int
    decode_flops: int
    prompt_flops: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes per second of a copy, operations per second of a product, bytes of a cached token."""

    work: ModelWork
    bandwidth: float
    flops: float
    token_bytes: int

    def roofline_s(self, batch: int, context: int) -> float:
        """A step of decodes, if memory and the products with weights were all that takes time."""
        weights_s = self.work.decode_bytes / self.bandwidth
        products_s = batch * self.work.decode_flops / self.flops
        return max(weights_s, products_s) + batch * context * self.token_bytes / self.bandwidth


def measure_model(shape: ModelShape, sizes: Sizes) -> Iterator[Measurement]:
    """Tokens per second of decodes, the parts of a step, and the rate of prompts."""
    release_models()
    work = yield from _measure_generate(shape, sizes)
    release_models()
    compute = choose_compute(partial(load_random, shape, sizes), sizes.backend, None)
    yield Measurement("model", f"{shape.name} runs with", compute.description)
    token_bytes = block_bytes(compute.loaded.layers, 1, compute.loaded.dtype)
    costs = Costs(work, copy_bandwidth(sizes), matrix_flops(sizes), token_bytes)
    for is_recorded in (False, True) if compute.is_recordable else (False,):
        yield from _measure_runner(shape.name, compute, costs, sizes, is_recorded=is_recorded)


def release_models() -> None:
    """Gives back the memory of those that nobody uses any more."""
    gc.collect()  # models hold themselves
    torch.cuda.empty_cache()


def _measure_generate(shape: ModelShape, sizes: Sizes) -> Generator[Measurement, None, ModelWork]:
    model = make_model(shape, sizes)
    for batch in sizes.batches:
        rate = _generate_rate(model, batch, sizes)
        yield Measurement("model", f"{shape.name}, {batch} rows, generate", rate, "tokens/s")
    return ModelWork(
        decode_bytes(model), decode_flops(model), prompt_flops(model, sizes.num_prompt_tokens)
    )


def _measure_runner(
    model_name: str, compute: Compute, costs: Costs, sizes: Sizes, *, is_recorded: bool
) -> Iterator[Measurement]:
    runner = make_runner(compute, sizes, is_recorded=is_recorded)
    kind = "graphs" if is_recorded else "no graphs"
    for batch in sizes.batches:
        times = decode_times(runner, batch, sizes)
        share = costs.roofline_s(batch, sizes.model_context) / times.wall_s
        name = f"{model_name}, {batch} rows, {kind}"
        note = f"{share:.0%} of what the device allows"
        yield Measurement("model", name, batch / times.wall_s, "tokens/s", note=note)
        parts = (times.move_s, times.forward_s, times.sample_s, times.gap_s)
        for part, seconds in zip(("moves", "forward", "sampling", "gap"), parts, strict=True):
            yield Measurement("step", f"{name}, {part}", seconds * 1e3, "ms")
    rate = costs.work.prompt_flops / _prompt_s(runner, sizes)
    name = f"{model_name}, {sizes.num_prompt_tokens} prompt tokens, {kind}"
    yield Measurement("step", name, rate / 1e12, "TFLOP/s")
    # The modules would keep the pools until the next ones are there.
    unbind(compute.loaded.attention_modules)


def make_runner(compute: Compute, sizes: Sizes, *, is_recorded: bool) -> ModelRunner:
    """With room for `sizes.batches`; its pools hold random numbers."""
    # One more begins a prompt beside the others.
    most_rows = max(sizes.batches) + 1
    make = compute.make_model
    if is_recorded:
        recorded = RecordedModels(make, most_rows, sizes.num_prompt_tokens, compute.static_draw)
        make = recorded.make
    width = _table_width(compute.block_size, sizes)
    config = CacheConfig(
        compute.block_size, most_rows * width, num_host_blocks=0, copy_blocks=compute.copy_blocks
    )
    runner = build_runner(compute.loaded, config, make, compute.draw)
    for pool in (*runner.cache.key_pools, *runner.cache.value_pools):
        pool.normal_()
    return runner


def _table_width(block_size: int, sizes: Sizes) -> int:
    decoded = sizes.model_context + _NUM_WARM_UPS + sizes.num_steps
    return -(-max(decoded, sizes.num_prompt_tokens) // block_size)


def make_step(block_size: int, sizes: Sizes, rows: int, computed: int, new: int) -> StepInput:
    """So many greedy rows with blocks of their own, `new` tokens each behind `computed`."""
    width = _table_width(block_size, sizes)
    return StepInput(
        step_id=1,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=np.arange(rows, dtype=np.int32),
        num_computed_tokens=np.full(rows, computed, dtype=np.int32),
        num_new_tokens=np.full(rows, new, dtype=np.int32),
        token_ids=(np.arange(rows * new, dtype=np.int32) * 7 + 11) % 97,
        samples=np.ones(rows, dtype=np.bool_),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
        num_prompt_tokens=np.ones(rows, dtype=np.int32),
        seeds=np.zeros(rows, dtype=np.int64),
        sampling_params=ParamRows.of([_GREEDY] * rows),
        histories=[None] * rows,
    )


def decode_times(runner: ModelRunner, batch: int, sizes: Sizes) -> StepTimes:
    """Of steps of `batch` decodes."""
    outputs: list[StepOutput] = []
    walls = []
    for index in range(_NUM_WARM_UPS + sizes.num_steps):
        step = make_step(runner.cache.block_size, sizes, batch, sizes.model_context + index, 1)
        started = now_s(runner.cache.device)
        output = runner.execute(step)
        if index >= _NUM_WARM_UPS:
            walls.append(now_s(runner.cache.device) - started)
            outputs.append(output)
    return StepTimes(
        wall_s=statistics.median(walls),
        move_s=statistics.median(output.move_us for output in outputs) / 1e6,
        forward_s=statistics.median(output.forward_us for output in outputs) / 1e6,
        sample_s=statistics.median(output.sample_us for output in outputs) / 1e6,
    )


def _prompt_s(runner: ModelRunner, sizes: Sizes) -> float:
    step = make_step(runner.cache.block_size, sizes, 1, 0, sizes.num_prompt_tokens)
    runner.execute(step)
    times_us = [runner.execute(step).forward_us for _ in range(sizes.num_runs)]
    return statistics.median(times_us) / 1e6


def _generate_rate(model: Any, batch: int, sizes: Sizes) -> float | str:  # noqa: ANN401
    """Tokens per second, or why there is no such number."""
    try:
        return batch * sizes.num_steps / _generate_s(model, batch, sizes)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "no memory"


def _generate_s(model: Any, batch: int, sizes: Sizes) -> float:  # noqa: ANN401
    """Seconds that `generate` takes for the steps of decodes alone."""
    prompt = torch.ones(batch, sizes.model_context, dtype=torch.int64, device=sizes.device)
    seconds = []
    for num_tokens in (2, 1, 1 + sizes.num_steps):
        started = now_s(sizes.device)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        seconds.append(now_s(sizes.device) - started)
    return max(seconds[2] - seconds[1], 1e-9)
