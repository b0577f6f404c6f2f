"""Block tables: allocate, append, free; freed blocks wait for the steps that still write them."""

from __future__ import annotations

from collections import deque
from enum import Enum

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.request import Sequence

WATERMARK_RATIO = 0.01


class Allocation(Enum):
    """Whether a waiting sequence gets its blocks."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Hands blocks of one executor's device pool to sequences.

    Source: Kwon 2023, section 4.2; the watermark is that of vLLM's first block manager.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._watermark = int(num_blocks * WATERMARK_RATIO)
        self._deferred: deque[tuple[int, list[int]]] = deque()

    @property
    def has_deferred(self) -> bool:
        """Whether blocks become free when steps in flight are answered."""
        return bool(self._deferred)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, sequence: Sequence, *, others_run: bool) -> Allocation:
        """Whether all known tokens of `sequence` fit now.

        While others run, a watermark of blocks is left to them, so that an admission is not undone
        by the next preemption.
        """
        needed = self.num_blocks_for(len(sequence.token_ids))
        if needed > self.pool.num_blocks:
            return Allocation.NEVER
        reserve = self._watermark if others_run else 0
        return Allocation.OK if self.pool.num_free - needed >= reserve else Allocation.LATER

    def allocate(self, sequence: Sequence) -> None:
        """Gives `sequence` the blocks of its known tokens. Mutates `block_table`."""
        assert not sequence.block_table, "allocated twice"
        sequence.block_table = self.pool.allocate(self.num_blocks_for(len(sequence.token_ids)))

    def append_block(self, sequence: Sequence) -> bool:
        """Extends `sequence` by a block; False if none is free. Mutates `block_table`."""
        if self.pool.num_free == 0:
            return False
        sequence.block_table += self.pool.allocate(1)
        return True

    def release(self, sequence: Sequence, last_answered_step_id: int) -> None:
        """Takes the blocks of `sequence` back, once no step in flight writes them.

        Mutates `block_table`.
        """
        blocks, sequence.block_table = sequence.block_table, []
        if sequence.last_step_id <= last_answered_step_id:
            self.pool.free(blocks)
        elif blocks:
            self._deferred.append((sequence.last_step_id, blocks))

    def step_answered(self, step_id: int) -> None:
        """Frees what waited for `step_id`. Steps are answered in order."""
        still_waiting = deque[tuple[int, list[int]]]()
        for waits_for, blocks in self._deferred:
            if waits_for <= step_id:
                self.pool.free(blocks)
            else:
                still_waiting.append((waits_for, blocks))
        self._deferred = still_waiting
