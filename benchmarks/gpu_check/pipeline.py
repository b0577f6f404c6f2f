"""Steps as they are served: the next begins before the last is over, and what they are made of.

Of what a server meets: greedy rows, rows that are cut, rows with penalties, and prompts that arrive
beside decodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.gpu_check.engine import make_runner, make_step, release_models
from benchmarks.gpu_check.models import load_random
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import ModelShape, Sizes
from benchmarks.gpu_check.timing import now_s
from executor_service.backends.choose import choose_compute
from executor_service.model.transformers_attention import unbind
from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from executor_service.steps.step import AwaitedTokens, Int64Array, PendingStep, StepInput

_DEPTH = 2
_NUM_WARM_UPS = 3
_PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=0.7),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1),
    "logprobs": SamplingParams(temperature=0.7, num_logprobs=5),
}


def measure_pipeline(shape: ModelShape, sizes: Sizes) -> Iterator[Measurement]:
    """Tokens per second of decodes two deep, and how long a step takes with a prompt beside."""
    release_models()
    compute = choose_compute(partial(load_random, shape, sizes), sizes.backend, None)
    runner = make_runner(compute, sizes, is_recorded=compute.is_recordable)
    for name, params in _PARAMS.items():
        for batch in sizes.batches:
            seconds = pipelined_s(runner, _decodes(runner, batch, params, sizes), sizes)
            line = f"{shape.name}, {batch} rows, {name}, two deep"
            yield Measurement("pipeline", line, batch / seconds, "tokens/s")
    for batch in sizes.batches:
        for chunk in sizes.chunks:
            steps = _with_prompts(runner, batch, chunk, sizes)
            seconds = pipelined_s(runner, steps, sizes)
            line = f"{shape.name}, {batch} decodes beside {chunk} tokens of a prompt, two deep"
            yield Measurement("pipeline", line, seconds * 1e3, "ms")
    # The modules would keep the pools until the next ones are there.
    unbind(compute.loaded.attention_modules)


def pipelined_s(runner: ModelRunner, steps: Iterator[StepInput], sizes: Sizes) -> float:
    """Seconds a step. Each is fed what the one before it sampled, which need not be over."""
    pending: deque[PendingStep] = deque()
    device, started = runner.cache.device, 0.0
    for index, step in zip(range(_NUM_WARM_UPS + sizes.num_steps), steps, strict=False):
        if index == _NUM_WARM_UPS:
            _finish(pending, 0)
            started = now_s(device)
        while pending and pending[0].is_done:
            pending.popleft().finish()
        awaited = AwaitedTokens(*_decode_rows(step)) if pending else None
        begun = runner.begin(replace(step, awaited=awaited))
        if begun is None:  # it has to know what the others sampled
            _finish(pending, 0)
            begun = runner.begin(step)
        assert begun is not None, "there is no step to wait for"
        pending.append(begun)
        _finish(pending, _DEPTH - 1)
    _finish(pending, 0)
    return (now_s(device) - started) / sizes.num_steps


def _finish(pending: deque[PendingStep], num_left: int) -> None:
    while len(pending) > num_left:
        pending.popleft().finish()


def _decode_rows(step: StepInput) -> tuple[Int64Array, Int64Array]:
    """The rows that go on, and that they do from the step before."""
    rows = np.flatnonzero(step.num_new_tokens == 1)
    return rows, np.full(len(rows), step.step_id - 1)


def _decodes(
    runner: ModelRunner, batch: int, params: SamplingParams, sizes: Sizes
) -> Iterator[StepInput]:
    block_size, context = runner.cache.block_size, sizes.model_context
    history = [7] * (context + _NUM_WARM_UPS + sizes.num_steps)
    for index in range(_NUM_WARM_UPS + sizes.num_steps):
        step = make_step(block_size, sizes, batch, context + index, 1)
        yield replace(
            step,
            step_id=index + 1,
            sampling_params=ParamRows.of([params] * batch),
            histories=[history if params.needs_history else None] * batch,
        )


def _with_prompts(runner: ModelRunner, batch: int, chunk: int, sizes: Sizes) -> Iterator[StepInput]:
    """The last row begins a prompt of `chunk` tokens in each step."""
    for step in _decodes(runner, batch + 1, _PARAMS["greedy"], sizes):
        computed, new = step.num_computed_tokens.copy(), step.num_new_tokens.copy()
        computed[-1], new[-1] = 0, chunk
        tokens = np.concatenate([step.token_ids[:-1], np.arange(chunk, dtype=np.int32) % 97])
        yield replace(step, num_computed_tokens=computed, num_new_tokens=new, token_ids=tokens)
