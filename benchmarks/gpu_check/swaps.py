"""Blocks between the device pool and the pinned host pool: how fast, and whether steps wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.runners import StepAt, pipelined_s, step_times, steps_of
from benchmarks.gpu_check.sizes import Rows, Sizes
from benchmarks.gpu_check.timing import now_s
from executor_service.runner import ModelRunner
from executor_service.steps import BlockMoves, StepInput

_NUM_ROWS = 8


def measure_swaps(runner: ModelRunner, num_blocks: int, sizes: Sizes) -> Iterator[Measurement]:
    """`num_blocks` out and back, and so many beside decodes of other blocks."""
    cache = runner.cache
    num_blocks = min(num_blocks, cache.num_device_blocks // 2, cache.num_host_blocks)
    host = np.arange(num_blocks, dtype=np.int32)
    there = host + np.int32(cache.num_device_blocks - num_blocks)
    moved = num_blocks * cache.block_bytes
    for name, move, moves in (
        ("out", cache.swap_out, BlockMoves(there, host)),
        ("in", cache.swap_in, BlockMoves(host, there)),
    ):
        seconds = []
        for _ in range(max(2, sizes.num_runs)):
            started = now_s(cache.device)
            move(moves)
            seconds.append(now_s(cache.device) - started)
        note = f"{moved / 2**20:.0f} MiB in one piece"
        yield Measurement(f"swap {name}", moved / min(seconds) / 1e9, "GB/s", note=note)
    rows: Rows = ((sizes.model_context, 1),) * min(_NUM_ROWS, max(sizes.batches))
    decode = steps_of(runner, rows)
    alone = pipelined_s(runner, decode, sizes.num_steps)
    swapping = _swapping(decode, BlockMoves(there, host))
    beside = pipelined_s(runner, swapping, sizes.num_steps)
    moving = step_times(runner, swapping, sizes.num_steps)
    note = f"{alone * 1e3:.2f} ms without; all one after the other {moving.wall_s * 1e3:.2f} ms"
    yield Measurement(f"{len(rows)} decodes beside swaps", beside * 1e3, "ms a step", note=note)


def _swapping(decode: StepAt, moves: BlockMoves) -> StepAt:
    def step(index: int) -> StepInput:
        return replace(decode(index), swap_out=moves)

    return step
