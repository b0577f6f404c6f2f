"""What keeps a request from beginning on an engine now."""

from __future__ import annotations

from enum import Enum


class AdmissionBlocker(Enum):
    """A reason why a request cannot have a row and blocks.

    POOL: no pool like this one will ever have enough blocks for it. OTHERS_FIRST: preempted
    requests of the engine, or suspects that are tried, go before it. RESULTS, BUDGET (tokens of a
    step) and BLOCKS_ON_THEIR_WAY pass by themselves.
    """

    ADAPTER_SLOT = "adapter_slot"
    BLOCKS = "blocks"
    ROWS = "rows"
    BYTES = "bytes"
    SHARE = "share"
    POOL = "pool"
    OTHERS_FIRST = "others_wait_there"
    # All of these pass by themselves, and nobody goes first.
    RESULTS = "results"
    BUDGET = "budget"
    BLOCKS_ON_THEIR_WAY = "blocks_on_their_way"
