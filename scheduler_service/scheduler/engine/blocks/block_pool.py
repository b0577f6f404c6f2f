"""Free list, refcounts and contents of the KV blocks of one pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol


class ContentsListener(Protocol):
    """Receives changes of the set of blocks that can be found in a pool."""

    def published(self, block_hash: bytes) -> None:
        """Notes that a block can be found by `block_hash`."""
        ...

    def forgotten(self, block_hash: bytes) -> None:
        """Notes that no block can be found by `block_hash` any more."""
        ...


class BlockPool:
    """Blocks 0 .. num_blocks-1. Invariant: a block is free or referenced, never both.

    A block may be *published* under the hash of its contents. A free published block stays findable
    until it is reused. Blank blocks are reused first, then published ones, least recently used
    first; `on_evict(block_id, block_hash)` is called for each of the latter while its contents are
    still there. State of a block begins with its first use, so the memory of a pool grows with the
    blocks used, not with its size.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._listener: ContentsListener | None = None
        # Used blocks that are free and blank (a stack), and those that are free and published (LRU
        # first). The lists below are indexed by block id and reach to the last block ever used.
        self._blank: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._reference_counts: list[int] = []
        self._hashes: list[bytes | None] = []
        # 1 for each block with a hash, so that a view of the whole pool reads bytes, not objects.
        self._has_hash = bytearray()
        self._published: dict[bytes, int] = {}

    def listen(self, listener: ContentsListener | None) -> None:
        """Reports the blocks that can be found, now and later, to `listener` only; None stops it.

        Calls `listener.published` for each block that can be found now.
        """
        self._listener = listener
        if listener is not None:
            for block_hash in self._published:
                listener.published(block_hash)

    @property
    def published_hashes(self) -> Collection[bytes]:
        """Hashes by which blocks can be found."""
        return self._published.keys()

    @property
    def num_free(self) -> int:
        """Number of blocks without references."""
        num_unused = self.num_blocks - len(self._reference_counts)
        return len(self._blank) + len(self._evictable) + num_unused

    @property
    def num_blank(self) -> int:
        """Number of free blocks that are not published."""
        return self.num_free - len(self._evictable)

    @property
    def num_published(self) -> int:
        """Number of blocks that can be found by their contents."""
        return len(self._published)

    def reference_count(self, block_id: int) -> int:
        """Returns the refcount of a block: how many block tables name it."""
        counts = self._reference_counts
        return counts[block_id] if block_id < len(counts) else 0

    def hash_of(self, block_id: int) -> bytes | None:
        """Returns the prefix hash of a published block; None for an unpublished block."""
        return self._hashes[block_id] if block_id < len(self._hashes) else None

    @property
    def reference_bytes(self) -> bytes:
        """Refcounts of all blocks ever used, one byte each; 255 also for more."""
        try:
            return bytes(self._reference_counts)
        except ValueError:
            return bytes(min(count, 255) for count in self._reference_counts)

    @property
    def published_bytes(self) -> bytes:
        """Publication flags of blocks used so far, a byte per block: 1 if published, else 0."""
        return bytes(self._has_hash)

    @property
    def free_blocks(self) -> list[int]:
        """Free blocks, in the order in which they are reused."""
        unused = range(len(self._reference_counts), self.num_blocks)
        return [*reversed(self._blank), *unused, *self._evictable]

    # -- references ----------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one reference. Needs `num_free >= count`.

        May evict published blocks.
        """
        assert count <= self.num_free, "allocation beyond the pool"
        num_blank = min(count, len(self._blank))
        blocks = self._blank[: -num_blank - 1 : -1] if num_blank else []
        del self._blank[len(self._blank) - num_blank :]
        if num_blank < count:
            blocks += self._begin_to_use(count - num_blank)
        for _ in range(count - len(blocks)):
            block_id, _ = self._evictable.popitem(last=False)
            block_hash = self._forget(block_id)
            if self._on_evict is not None:
                self._on_evict(block_id, block_hash)
            blocks.append(block_id)
        counts = self._reference_counts
        for block_id in blocks:
            counts[block_id] = 1
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block; a free block is no longer free."""
        counts = self._reference_counts
        for block_id in block_ids:
            if counts[block_id] == 0:
                del self._evictable[block_id]
            counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each block; a block without references becomes free.

        Of the blocks of one table the last counts as the least recently used: a prefix outlives its
        continuations.
        """
        counts = self._reference_counts
        for block_id in reversed(block_ids):
            counts[block_id] -= 1
            if counts[block_id] == 0:
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._evictable[block_id] = None
            assert counts[block_id] >= 0, f"block {block_id} freed twice"

    # -- contents ------------------------------------------------------------------------------

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block published under `block_hash`, or None."""
        return self._published.get(block_hash)

    def find_run(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks published under the leading `block_hashes`, up to the first miss."""
        published, blocks = self._published, list[int]()
        for block_hash in block_hashes:
            if block_hash not in published:
                break
            blocks.append(published[block_hash])
        return blocks

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Makes a referenced block findable; False if another block is published under the hash."""
        if self._published.setdefault(block_hash, block_id) != block_id:
            return False
        self._hashes[block_id] = block_hash
        self._has_hash[block_id] = 1
        if self._listener is not None:
            self._listener.published(block_hash)
        return True

    def unpublish(self, block_id: int) -> None:
        """Makes a block unfindable, because its contents are not those of its hash.

        Does nothing for a block that is not published.
        """
        if block_id >= len(self._hashes) or self._hashes[block_id] is None:
            return
        self._forget(block_id)
        if self._reference_counts[block_id] == 0:
            del self._evictable[block_id]
            self._blank.append(block_id)

    def num_referenced(self, block_ids: Iterable[int]) -> int:
        """Returns how many of these blocks, all used before, are not free."""
        counts = self._reference_counts
        return len([block_id for block_id in block_ids if counts[block_id]])

    def _begin_to_use(self, count: int) -> range:
        """Returns ids of up to `count` blocks that were never allocated before."""
        first = len(self._reference_counts)
        count = min(count, self.num_blocks - first)
        self._reference_counts += [0] * count
        self._hashes += [None] * count
        self._has_hash += bytes(count)
        return range(first, first + count)

    def _forget(self, block_id: int) -> bytes:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        self._hashes[block_id] = None
        self._has_hash[block_id] = 0
        del self._published[block_hash]
        if self._listener is not None:
            self._listener.forgotten(block_hash)
        return block_hash
