"""Who runs next and who is preempted: first come, first served, decodes before prefills.

A policy orders and picks; it does not know how blocks are allocated.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.core.request import Sequence
from scheduler_service.core.row_columns import Int32Array, RowColumns


def pick_running(rows: RowColumns, budget: int) -> tuple[Int32Array, Int32Array]:
    """Decodes first, then prefills, oldest first: row ids and how many tokens each computes.

    The last prefill may get only a chunk of what it still has to compute.
    """
    order = rows.order
    pending = rows.pending_tokens(order)
    row_ids = order[pending == 1][:budget]
    num_new_tokens = np.ones(len(row_ids), np.int32)
    budget -= len(row_ids)
    prefills = np.flatnonzero(pending > 1)
    if len(prefills) == 0 or budget == 0:
        return row_ids, num_new_tokens
    wanted = pending[prefills]
    wanted_before = np.cumsum(wanted) - wanted
    chunks = np.minimum(wanted, budget - wanted_before)
    is_picked = chunks > 0
    return (
        np.concatenate([row_ids, order[prefills[is_picked]]]),
        np.concatenate([num_new_tokens, chunks[is_picked].astype(np.int32)]),
    )


def choose_victim(rows: RowColumns) -> Sequence:
    """The least urgent of the running sequences: the youngest."""
    return rows.by_arrival[-1]
