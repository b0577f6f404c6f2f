"""The block moves of a step: swaps beside the computing, where nothing forbids it.

What orders two accesses to a block of which one writes: the swap stream does its moves in order,
and each step's after all that was computed before; computing waits for swap-ins always, and for
swap-outs before it touches a block that they still read. Blocks of the host pool are touched by the
swap stream alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import DeviceStreams, Timer
from executor_service.steps.step import Int32Array, StepInput


class BlockTransfers:
    """Moves blocks between and within the pools of a cache."""

    def __init__(self, cache: KVCache, streams: DeviceStreams) -> None:
        self._cache = cache
        self._streams = streams
        # Device blocks that swap-outs may still be reading, beside the timers of these.
        self._leaving: list[tuple[Timer, Int32Array]] = []

    def begin(self, step: StepInput) -> list[Timer]:
        """Asks for all moves of `step`. What compute is asked from now on finds them done.

        Returns what times the moves; they are over when these are.
        """
        timers: list[Timer] = []
        if len(step.swap_out.sources) or len(step.swap_in.sources):
            timers.append(self._swap(step))
        if len(step.swap_in.sources) or self._overwrites_leaving(step):
            self._streams.compute_after_swap()
            self._leaving.clear()
        if len(step.copy.sources):
            timer = self._streams.start_timer()
            self._cache.copy(step.copy)
            timer.stop()
            timers.append(timer)
        return timers

    def finish(self, timers: Sequence[Timer]) -> int:
        """Waits for the moves that `timers` time; returns how long they took, in microseconds."""
        move_us = sum(timer.elapsed_us() for timer in timers)
        for number, (timer, _) in enumerate(self._leaving):
            if timer in timers:
                # Swaps are done in order: those of earlier steps, which may have broken off, too.
                del self._leaving[: number + 1]
                break
        return move_us

    def _swap(self, step: StepInput) -> Timer:
        self._streams.swap_after_compute()
        with self._streams.swapping():
            timer = self._streams.start_timer()
            self._leaving.append((timer, step.swap_out.sources))
            self._cache.swap_out(step.swap_out)
            self._cache.swap_in(step.swap_in)
            timer.stop()
        return timer

    def _overwrites_leaving(self, step: StepInput) -> bool:
        if not self._leaving:
            return False
        leaving = np.concatenate([blocks for _, blocks in self._leaving])
        return bool(np.isin(leaving, _touched(step)).any())


def _touched(step: StepInput) -> Int32Array:
    """The device blocks that compute may write in `step`, and others."""
    parts = [step.block_tables.ravel(), step.copy.destinations]
    if step.cross is not None:
        parts.append(step.cross.block_tables.ravel())
    touched: Int32Array = np.concatenate(parts)
    return touched
