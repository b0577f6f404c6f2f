"""The blocks of one pool as a map: what each is, and whose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class PoolMap:
    """A pool at one moment. `states`, `holders`: [num_blocks], and nobody writes to them."""

    block_size: int
    states: ByteArray
    holders: Int64Array

    def tell_changes(self, before: PoolMap | None, told: live.LivePool) -> None:
        """Adds to `told` where it differs from `before`; None for a pool that is free and blank."""
        if before is None:
            differs = (self.states != 0) | (self.holders != 0)
        else:
            differs = (self.states != before.states) | (self.holders != before.holders)
        changed = np.flatnonzero(differs)
        told.num_blocks = len(self.states)
        told.block_size = self.block_size
        told.changed.extend(changed.tolist())
        told.states = self.states[changed].tobytes()
        told.holders.extend(self.holders[changed].tolist())
