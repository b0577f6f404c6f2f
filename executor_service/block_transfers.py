"""The block moves of a step: swaps beside the computing, where nothing forbids it.

What orders two accesses to a block of which one writes: the swap stream does its moves in order,
and each step's after all that was computed before; computing waits for swap-ins always, and for
swap-outs before it touches a block that they still read. Blocks of the host pool are touched by the
swap stream alone.
"""

from __future__ import annotations

import numpy as np

from executor_service.device_streams import Streams, Timer
from executor_service.kv_cache import KVCache
from executor_service.step import Int32Array, StepInput

_NO_IDS = np.empty(0, np.int32)


class BlockTransfers:
    """Moves blocks between and within the pools of a cache."""

    def __init__(self, cache: KVCache, streams: Streams) -> None:
        self._cache = cache
        self._streams = streams
        self._swap_timer: Timer | None = None
        self._copy_timer: Timer | None = None
        # Device blocks that a swap-out may still be reading.
        self._leaving = _NO_IDS

    def begin(self, step: StepInput) -> None:
        """Asks for all moves of `step`. What compute is asked from now on finds them done."""
        self._swap_timer = self._copy_timer = None
        if len(step.swap_out.sources) or len(step.swap_in.sources):
            self._swap_timer = self._swap(step)
        if len(step.swap_in.sources) or self._overwrites_leaving(step):
            self._streams.compute_after_swap()
            self._leaving = _NO_IDS
        if len(step.copy.sources):
            self._copy_timer = self._streams.start_timer()
            self._cache.copy(step.copy)
            self._copy_timer.stop()

    def finish(self) -> int:
        """Waits for the moves of the step; returns how long they took, in microseconds."""
        move_us = 0 if self._copy_timer is None else self._copy_timer.elapsed_us()
        if self._swap_timer is not None:
            move_us += self._swap_timer.elapsed_us()
            # Over, and with it those of earlier steps that broke off.
            self._leaving = _NO_IDS
        return move_us

    def _swap(self, step: StepInput) -> Timer:
        self._leaving = np.concatenate([self._leaving, step.swap_out.sources])
        self._streams.swap_after_compute()
        with self._streams.swapping():
            timer = self._streams.start_timer()
            self._cache.swap_out(step.swap_out)
            self._cache.swap_in(step.swap_in)
            timer.stop()
        return timer

    def _overwrites_leaving(self, step: StepInput) -> bool:
        return len(self._leaving) > 0 and bool(np.isin(self._leaving, _touched(step)).any())


def _touched(step: StepInput) -> Int32Array:
    """The device blocks that compute may write in `step`, and others."""
    parts = [step.block_tables.ravel(), step.copy.destinations]
    if step.cross is not None:
        parts.append(step.cross.block_tables.ravel())
    touched: Int32Array = np.concatenate(parts)
    return touched
