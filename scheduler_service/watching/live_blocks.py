"""Blocks of a pool at one moment: the state of each, and the request that holds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.config import Feature
from scheduler_service.core.engine import Engine
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Int64Array
from scheduler_service.core.row_columns import RELEASED
from splitserve.scheduler.v1 import live_pb2 as live

ByteArray = npt.NDArray[np.uint8]


class BlockState(IntEnum):
    """States of a block, with the numbers of `LivePool.states`."""

    FREE = 0
    HELD = 1
    SHARED = 2
    CACHED = 3
    GIVEN_BACK = 4
    ON_THE_MOVE = 5


_SHARED, _CACHED = np.uint8(BlockState.SHARED), np.uint8(BlockState.CACHED)
_NO_STATES, _NO_HOLDERS = np.empty(0, np.uint8), np.empty(0, np.int64)
# Reference counts of one byte end here.
_MANY = 255


def block_states(pool: BlockPool, given_back: Sequence[int], moved: Collection[int]) -> ByteArray:
    """Returns the `BlockState` of each block of `pool`, [num_blocks] uint8.

    `given_back`: one entry for each reference that ends with a step in flight. `moved`: blocks that
    steps copy from or to.
    """
    states = np.zeros(pool.num_blocks, np.uint8)
    counts = np.frombuffer(pool.reference_bytes, np.uint8)
    published = np.frombuffer(pool.published_bytes, np.uint8)
    used = states[: len(counts)]
    np.minimum(counts, _SHARED, out=used)
    used[published > counts] = _CACHED
    if given_back:
        blocks, references = np.unique(given_back, return_counts=True)
        last = (counts[blocks] == references) & (references < _MANY)
        states[blocks[last]] = BlockState.GIVEN_BACK
    if moved:
        states[list(moved)] = BlockState.ON_THE_MOVE
    return states


@dataclass(frozen=True, slots=True, eq=False)
class PoolMap:
    """A pool at one moment. `states`, `holders`: [num_blocks], never written to."""

    block_size: int
    states: ByteArray
    holders: Int64Array

    @classmethod
    def of_none(cls, block_size: int) -> PoolMap:
        """Returns the map of a pool that has no blocks."""
        return cls(block_size, _NO_STATES, _NO_HOLDERS)

    def tell_changes(self, before: PoolMap | None, told: live.LivePool) -> None:
        """Adds to `told` the blocks that differ from `before`; None: from a pool that is free."""
        told.num_blocks = len(self.states)
        told.block_size = self.block_size
        if before is None:
            differs = (self.states != 0) | (self.holders != 0)
        else:
            differs = (self.states != before.states) | (self.holders != before.holders)
        changed = differs.nonzero()[0]
        if len(changed) == 0:
            return
        told.changed.extend(changed.tolist())
        told.states = self.states[changed].tobytes()
        told.holders.extend(self.holders[changed].tolist())


def device_holders(core: Engine, numbers: Int64Array) -> Int64Array:
    """Returns for each device block the number of a request whose row has it, 0 for none.

    `numbers`: of the requests of `placement.rows.order`.
    """
    placement, rows = core.placement, core.placement.rows
    holders = np.zeros(placement.blocks.device.num_blocks, np.int64)
    order = rows.order
    if len(order) == 0:
        return holders
    lengths = -(-rows.num_slots[order].astype(np.int64) // rows.block_size)
    starts = rows.num_released[order].astype(np.int64)
    counts = lengths - starts
    # Columns of the block table that each row has, the rows one after the other.
    firsts = np.repeat(np.cumsum(counts) - counts - starts, counts)
    columns = np.arange(int(counts.sum())) - firsts
    blocks = rows.block_tables[np.repeat(order, counts), columns]
    # Written last: the most urgent of the requests that share a block.
    holders[blocks[::-1]] = np.repeat(numbers, counts)[::-1]
    if Feature.CROSS_ATTENTION in core.config.features:
        for request in placement.requests.values():
            if request.cross_blocks:
                holders[request.cross_blocks] = request.arrival
    return holders


def host_holders(placement: Placement) -> Int64Array:
    """Returns for each host block the number of the swapped request that has it, 0 for none."""
    holders = np.zeros(placement.blocks.host.num_blocks, np.int64)
    for request in placement.swapped:
        for sequence in request.sequences:
            blocks = [block for block in sequence.host_table if block != RELEASED]
            holders[blocks] = request.arrival
        holders[request.host_cross_blocks] = request.arrival
    return holders
