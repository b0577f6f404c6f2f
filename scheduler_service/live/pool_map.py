"""The blocks of one pool as a map: what each is, and whose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.request import Int64Array
from splitserve.scheduler.v1 import live_pb2 as live

ByteArray = npt.NDArray[np.uint8]


class BlockState(IntEnum):
    """As `LivePool.states` says it."""

    FREE = 0
    HELD = 1
    SHARED = 2
    CACHED = 3
    GIVEN_BACK = 4
    ON_THE_MOVE = 5


def block_states(pool: BlockPool, given_back: Sequence[int], moved: Collection[int]) -> ByteArray:
    """What each block of `pool` is, [num_blocks].

    `given_back`: one entry for each reference that ends with a step in flight. `moved`: blocks that
    steps fill from others, or others from them.
    """
    counts = np.zeros(pool.num_blocks, np.int64)
    used = pool.reference_counts
    try:
        # The fastest way out of a list.
        counts[: len(used)] = np.frombuffer(bytes(used), np.uint8)
    except ValueError:
        counts[: len(used)] = used  # more than 255 share a block
    states: ByteArray = np.minimum(counts, BlockState.SHARED).astype(np.uint8)
    states[pool.cached_blocks] = BlockState.CACHED
    if given_back:
        blocks, references = np.unique(given_back, return_counts=True)
        states[blocks[counts[blocks] == references]] = BlockState.GIVEN_BACK
    if moved:
        states[list(moved)] = BlockState.ON_THE_MOVE
    return states


class PoolMap:
    """What one watcher was told of a pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._states: ByteArray = np.zeros(num_blocks, np.uint8)
        self._holders: Int64Array = np.zeros(num_blocks, np.int64)

    def tell(self, states: ByteArray, holders: Int64Array, told: live.LivePool) -> None:
        """Adds to `told` where they differ from the last ones, which they are from now on."""
        changed = np.flatnonzero((states != self._states) | (holders != self._holders))
        told.num_blocks = len(states)
        told.block_size = self._block_size
        told.changed.extend(changed.tolist())
        told.states = states[changed].tobytes()
        told.holders.extend(holders[changed].tolist())
        self._states, self._holders = states, holders
