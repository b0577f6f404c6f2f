"""Free list and reference counts of KV blocks."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 .. num_blocks-1. Invariant: a block is free or referenced, never both."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._reference_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to."""
        return len(self._free)

    def reference_count(self, block_id: int) -> int:
        """How many block tables name the block."""
        return self._reference_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one reference. Needs `num_free >= count`."""
        assert count <= len(self._free), "allocation beyond the pool"
        if count == 0:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each; a block without references becomes free."""
        for block in block_ids:
            count = self._reference_counts[block] - 1
            assert count >= 0, f"block {block} freed twice"
            self._reference_counts[block] = count
            if count == 0:
                self._free.append(block)
