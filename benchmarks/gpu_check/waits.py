"""Whether a step begins without waiting for the one before it, whatever its rows ask for.

Each kind of step is begun while the device is busy for longer than a call may take, and fed what
the step before it has yet to sample; and once more where torch raises if anything waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.aims import ASKING_MS, judged
from benchmarks.gpu_check.busy_device import busy
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import (
    StepAt,
    awaiting,
    load,
    pipelined_s,
    release_models,
    runner_of,
    steps_of,
)
from benchmarks.gpu_check.sizes import ModelShape, Rows, Sizes
from benchmarks.gpu_check.steps import ALL_PARAMS
from benchmarks.gpu_check.timing import now_s
from executor_service.runner import ModelRunner
from executor_service.steps import BlockMoves, PendingStep, SamplingParams, StepInput

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
    times = _begin_times(runner, step_at, sizes)
    new = f"{name}: rows that are new"
    if sizes.device.type != "cuda":
        yield Measurement(new, times.new_ms, "ms to begin")
    else:
        is_met = not times.is_new_late
        yield Measurement(new, times.new_ms, "ms to begin", "before the device is idle", is_met)
    if times.waited_ms is None:
        note = "it has to wait for the step before"
        yield Measurement(name, "begins late", is_met=False, note=note)
    else:
        note = f"{times.busy_ms:.2f} ms to begin, {times.idle_ms:.2f} on an idle device"
        yield judged(name, times.waited_ms, "ms of waiting", ASKING_MS, sizes, note)
    if sizes.device.type == "cuda":
        yield Measurement(f"{name}: what waits in torch", *_found(runner, step_at(3)))


@dataclass(frozen=True, slots=True)
class _BeginTimes:
    """Milliseconds that steps take to begin: beside a busy device, and on an idle one.

    `new_ms`: a step of rows that the runner has not seen, beside a busy device. `busy_ms`, None
    where it cannot begin: the next one of these rows. `idle_ms`: the one after it. `is_new_late`:
    the first had begun only when the device was done with everything.
    """

    new_ms: float
    is_new_late: bool
    busy_ms: float | None
    idle_ms: float

    @property
    def waited_ms(self) -> float | None:
        """Time to begin a step that the busy device adds, in ms; None if the step cannot begin."""
        return None if self.busy_ms is None else max(0.0, self.busy_ms - self.idle_ms)


def _begin_times(runner: ModelRunner, step_at: StepAt, sizes: Sizes) -> _BeginTimes:
    """The second step is fed what the first samples, which the host does not know yet.

    When the second begins, the first is over on the device: what both launch may be more than the
    device's queue takes, and launches that find it full wait, however the steps are made. On a CPU
    a step is over when it has begun.
    """
    device = sizes.device
    begun: deque[PendingStep] = deque()

    def begin(step: StepInput) -> float | None:
        started = time.perf_counter()
        pending = runner.begin(step)
        milliseconds = (time.perf_counter() - started) * 1e3
        if pending is None:
            return None
        begun.append(pending)
        return milliseconds

    def following(index: int) -> StepInput:
        """A step whose tokens are awaited, unless the one before was over when it had begun."""
        return step_at(index) if is_new_late else awaiting(step_at(index))

    try:
        with busy(device):
            new_ms = begin(step_at(0))
            is_new_late = begun[0].is_done
        with busy(device):
            busy_ms = begin(following(1))
        begun.popleft().finish()
        now_s(device)
        idle_ms = begin(following(2) if begun else step_at(2))
    finally:
        for pending in begun:
            pending.finish()
    assert new_ms is not None, "all earlier steps are finished"
    assert idle_ms is not None, "all earlier steps are finished"
    return _BeginTimes(new_ms, is_new_late, busy_ms, idle_ms)


def _found(runner: ModelRunner, step: StepInput) -> tuple[Any, ...]:
    """What torch says to a step in which nothing may wait: value, unit, aim, verdict and note."""
    try:
        with _raising_waits():
            pending = runner.begin(step)
        assert pending is not None, "all earlier steps are finished"
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
