"""Who holds which block, by the block tables of a core."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import Feature
from scheduler_service.core.engine import Engine
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Int64Array
from scheduler_service.core.row_columns import RELEASED


def device_holders(core: Engine, numbers: Int64Array) -> Int64Array:
    """Of each device block the number of one request whose row has it, or 0.

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
    # Of every row the columns that it has, the rows end to end.
    firsts = np.repeat(np.cumsum(counts) - counts - starts, counts)
    columns = np.arange(int(counts.sum())) - firsts
    blocks = rows.block_tables[np.repeat(order, counts), columns]
    # The most urgent of those that share a block is written last.
    holders[blocks[::-1]] = np.repeat(numbers, counts)[::-1]
    if Feature.CROSS_ATTENTION in core.config.features:
        for request in placement.requests.values():
            if request.cross_blocks:
                holders[request.cross_blocks] = request.arrival
    return holders


def host_holders(placement: Placement) -> Int64Array:
    """The same of host blocks, which swapped requests have."""
    holders = np.zeros(placement.blocks.host.num_blocks, np.int64)
    for request in placement.swapped:
        for sequence in request.sequences:
            blocks = [block for block in sequence.host_table if block != RELEASED]
            holders[blocks] = request.arrival
        holders[request.host_cross_blocks] = request.arrival
    return holders
