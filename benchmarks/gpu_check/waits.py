"""Whether a step begins without waiting for the one before it, whatever its rows ask for.

Each kind of step is begun while the device is busy for longer than a call may take, and fed what
the step before it has yet to sample; and once more where torch raises if anything waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.aims import ASKING_MS, judged
from benchmarks.gpu_check.busy_device import busy
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import (
    awaiting,
    load,
    pipelined_s,
    release_models,
    runner_of,
    steps_of,
)
from benchmarks.gpu_check.sizes import ModelShape, Rows, Sizes
from benchmarks.gpu_check.steps import ALL_PARAMS
from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import BlockMoves, StepInput

_MIN_P = SamplingParams(temperature=0.7, min_p=0.05)
_NUM_LAYERS = 4
_NUM_BLOCKS, _NUM_HOST_BLOCKS = 6000, 64
_MOVED = 8


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of our decoder and of transformers' own code, recorded where that can be."""
    few_layers = {**sizes.small_model.options, "num_hidden_layers": _NUM_LAYERS}
    for shape in (replace(sizes.small_model, options=few_layers), sizes.others_model):
        release_models()
        compute = load(shape, sizes)
        for is_recorded in {False, compute.is_recordable}:
            most_rows = max(sizes.batches) + 1
            with runner_of(
                compute,
                _NUM_BLOCKS,
                most_rows,
                sizes,
                is_recorded=is_recorded,
                num_host_blocks=_NUM_HOST_BLOCKS,
            ) as runner:
                yield from _cases(shape, runner, sizes, is_recorded=is_recorded)


def _cases(
    shape: ModelShape, runner: ModelRunner, sizes: Sizes, *, is_recorded: bool
) -> Iterator[Case]:
    recorded = "recorded" if is_recorded else "not recorded"
    decodes: Rows = ((sizes.model_context, 1),) * max(sizes.batches)
    beside: Rows = (*decodes, (0, max(sizes.chunks)))
    wide: Rows = ((8000 // sizes.divisor, 1),) * min(32, max(sizes.batches))
    kinds: dict[str, tuple[Rows, SamplingParams]] = {
        **{kind: (decodes, params) for kind, params in ALL_PARAMS.items()},
        "min-p": (decodes, _MIN_P),
        "long tables": (wide, ALL_PARAMS["greedy"]),
        "beside a prompt": (beside, ALL_PARAMS["greedy"]),
        "top-p beside a prompt": (beside, ALL_PARAMS["top-p"]),
    }
    for kind in ("penalties", "top-p beside a prompt") if sizes.is_smoke else kinds:
        rows, params = kinds[kind]
        name = f"{shape.name}, {recorded}, {kind}"
        yield Case(name, 3, partial(_measure, name, runner, rows, params, sizes))
    name = f"{shape.name}, {recorded}, swaps and copies"
    yield Case(name, 3, partial(_measure, name, runner, decodes[:8], _MIN_P, sizes, moves=True))


def _measure(
    name: str,
    runner: ModelRunner,
    rows: Rows,
    params: SamplingParams,
    sizes: Sizes,
    *,
    moves: bool = False,
) -> Iterator[Measurement]:
    plain = steps_of(runner, rows, params)

    def step_at(index: int) -> StepInput:
        return _with_moves(plain(index), runner) if moves else plain(index)

    pipelined_s(runner, step_at, sizes.num_steps)  # compiles, and makes buffers
    milliseconds = _begin_beside_another(runner, step_at(0), step_at(1), sizes)
    if milliseconds is None:
        note = "it has to wait for the step before"
        yield Measurement(name, "begins late", is_met=False, note=note)
    else:
        yield judged(name, milliseconds, "ms to begin", ASKING_MS, sizes)
    if sizes.device.type == "cuda":
        yield Measurement(f"{name}: what waits in torch", *_found(runner, step_at(2)))


def _begin_beside_another(
    runner: ModelRunner, first: StepInput, second: StepInput, sizes: Sizes
) -> float | None:
    """Milliseconds that `second` takes to begin while `first` waits for its turn; None: it cannot.

    On a CPU the first is over when it has begun.
    """
    begun = []
    try:
        with busy(sizes.device):
            begun.append(runner.begin(first))
            step = second if sizes.device.type == "cpu" else awaiting(second)
            started = time.perf_counter()
            begun.append(runner.begin(step))
            milliseconds = (time.perf_counter() - started) * 1e3
    finally:
        for pending in begun:
            if pending is not None:
                pending.finish()
    return None if begun[-1] is None else milliseconds


def _found(runner: ModelRunner, step: StepInput) -> tuple[Any, ...]:
    """What torch says to a step in which nothing may wait: value, unit, aim, verdict and note."""
    try:
        with _raising_waits():
            pending = runner.begin(step)
        assert pending is not None, "there is no step to wait for"
    except Exception as error:  # StepFailed, of what torch raised
        return "it waits", "", "nothing", False, str(error.__cause__ or error)[:200]
    errors = pending.finish().row_errors
    if errors:
        return "it waits", "", "nothing", False, next(iter(errors.values()))[:200]
    return "nothing", "", "nothing", True


@contextmanager
def _raising_waits() -> Iterator[None]:
    cuda: Any = torch.cuda
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


def _with_moves(step: StepInput, runner: ModelRunner) -> StepInput:
    """Blocks behind those of the rows leave, come and are copied."""
    last = runner.cache.num_device_blocks
    host = np.arange(_MOVED, dtype=np.int32)
    leaving, coming, source, target = (
        np.arange(last - n * _MOVED, last - (n - 1) * _MOVED, dtype=np.int32) for n in (1, 2, 3, 4)
    )
    return replace(
        step,
        swap_out=BlockMoves(leaving, host),
        swap_in=BlockMoves(host + _MOVED, coming),
        copy=BlockMoves(source, target),
    )
