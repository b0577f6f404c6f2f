"""Index of the prefixes cached by all executors: one walk along a hash chain answers for all.

Block pools report when a block becomes findable and when it stops being so. So the index says of
each executor what `PrefixCache.find` of its engine would. The index belongs to no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.scheduler.engine.blocks import (
    RUN_BLOCKS,
    BlockPool,
    RememberedNames,
    first_block_needed,
    may_skip_prefix,
    num_findable_blocks,
)
from scheduler_service.scheduler.values import Request, SchedulerConfig, Sequence

# Most blocks of a prompt that are looked up; longer prompts may report less than is cached.
MAX_BLOCKS = 8192


@dataclass(slots=True)
class Prefixes:
    """Cached prefixes of one request, as parallel lists over the executors with a prefix.

    `numbers`: numbers of these executors. `num_tokens`: cached tokens at each; `num_host_blocks`:
    how many of their blocks are in the host pool. `family`: number shared by prompts that continue
    alike where the longest cached prefix ends; 0 if no block tells.
    """

    numbers: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_host_blocks: list[int] = field(default_factory=list)
    family: int = 0

    @property
    def cached(self) -> dict[int, CachedPrefix]:
        """Cached prefixes by executor number."""
        prefixes = map(CachedPrefix, self.num_tokens, self.num_host_blocks)
        return dict(zip(self.numbers, prefixes, strict=True))

    def add(self, numbers: list[int], num_tokens: int, num_host_blocks: int) -> None:
        """Adds executors, each with `num_tokens` cached and `num_host_blocks` in the host pool."""
        self.numbers += numbers
        self.num_tokens += [num_tokens] * len(numbers)
        self.num_host_blocks += [num_host_blocks] * len(numbers)


@dataclass(slots=True)
class _Member:
    """Executor in the index. `place`: position of its bits in the masks of its shelf.

    `expected`: hashes of blocks that the executor was given to compute, since the latest `settle`,
    and between that and the one before.
    """

    shelf: _Shelf
    place: int
    device: BlockPool
    host: BlockPool
    expected: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))

    def listener(self, bit: int) -> _PoolBit:
        """Returns a pool listener that sets this executor's `bit`, DEVICE_BIT or HOST_BIT."""
        return _PoolBit(self.shelf.masks, bit << NUM_BITS * self.place)


class _Shelf:
    """Executors that share block hashes and the way to find cached blocks.

    `masks`: by block hash, a bit for each pool that has the block.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.masks: dict[bytes, int] = {}
        self.numbers: dict[int, int] = {}
        self.places = 0

    def enter(self, number: int) -> int:
        """Assigns the first free place to an executor; returns the place."""
        place = next(at for at in range(len(self.numbers) + 1) if at not in self.numbers)
        self.numbers[place] = number
        self.places |= DEVICE_BIT << NUM_BITS * place
        return place

    def leave(self, place: int) -> None:
        """Frees a place for another executor."""
        del self.numbers[place]
        self.places &= ~(DEVICE_BIT << NUM_BITS * place)


@dataclass(slots=True)
class _PoolBit:
    """Listener of one block pool, which updates the pool's bit in the masks.

    Consecutive blocks are mostly held by the same executors. Equal masks of consecutive updates are
    one object, which saves memory and time for comparisons. `_last`: the latest update of a mask,
    before and after.
    """

    masks: dict[bytes, int]
    bit: int
    _last: tuple[int, int] = (0, 0)

    def published(self, block_hash: bytes) -> None:
        mask = self.masks.get(block_hash, 0)
        self.masks[block_hash] = self._changed(mask, mask | self.bit)

    def forgotten(self, block_hash: bytes) -> None:
        mask = self.masks.get(block_hash, 0)
        if mask & ~self.bit:
            self.masks[block_hash] = self._changed(mask, mask & ~self.bit)
        else:
            self.masks.pop(block_hash, None)

    def _changed(self, mask: int, after: int) -> int:
        if self._last != (mask, after):
            self._last = mask, after
        return self._last[1]


class PrefixIndex:
    """Cached blocks of all executors. The caller of `add` numbers the executors."""

    def __init__(self) -> None:
        self._shelves: dict[object, _Shelf] = {}
        self._members: dict[int, _Member] = {}
        self._names = RememberedNames()

    @property
    def num_hashes(self) -> int:
        """Number of distinct blocks that some executor holds, counted once for each shelf."""
        return sum(len(shelf.masks) for shelf in self._shelves.values())

    def add(self, number: int, config: SchedulerConfig, device: BlockPool, host: BlockPool) -> None:
        """Adds an executor and listens to its pools from now on. `number` must not be in use."""
        assert number not in self._members, f"executor {number} is in the index already"
        kind = (config.hash_kind, config.sliding_window, config.prefix_caching)
        shelf = self._shelves.setdefault(kind, _Shelf(config))
        place = shelf.enter(number)
        member = self._members[number] = _Member(shelf, place, device, host)
        device.listen(member.listener(DEVICE_BIT))
        host.listen(member.listener(HOST_BIT))

    def remove(self, number: int) -> None:
        """Forgets an executor and its cached blocks."""
        for _ in range(2):
            self.settle(number)
        member = self._members.pop(number)
        shelf = member.shelf
        for pool, bit in ((member.device, DEVICE_BIT), (member.host, HOST_BIT)):
            pool.listen(None)
            for block_hash in pool.published_hashes:
                member.listener(bit).forgotten(block_hash)
        shelf.leave(member.place)
        if not shelf.numbers:
            self._shelves = {kind: kept for kind, kept in self._shelves.items() if kept.numbers}

    def expect(self, number: int, request: Request) -> None:
        """Marks the prompt blocks of a request as cached at the executor that is about to get it.

        So the next request with the same prefix finds them before they are computed.
        """
        member, sequence = self._members[number], request.unfinished[0]
        config = member.shelf.config
        if not may_skip_prefix(config, sequence):
            return
        chain = sequence.chains.setdefault(config.hash_kind, [])
        num_blocks = min(num_findable_blocks(config, sequence), MAX_BLOCKS)
        self._names.grow_chain(chain, config, request, sequence.token_ids, num_blocks)
        listener, there = member.listener(DEVICE_BIT), member.device.published_hashes
        new = [name for name in chain[1 : num_blocks + 1] if name not in there]
        for block_hash in new:
            listener.published(block_hash)
        member.expected[0].extend(new)

    def settle(self, number: int) -> None:
        """Drops expected blocks that an executor does not have; called before it plans a step.

        Only blocks expected before the previous `settle` are checked. If such a block is missing,
        its request did not begin.
        """
        member = self._members[number]
        newer, older = member.expected
        listener = member.listener(DEVICE_BIT)
        for block_hash in older:
            if member.device.find(block_hash) is None:
                listener.forgotten(block_hash)
        member.expected = [], newer

    def find(self, request: Request) -> Prefixes:
        """Returns the cached prefixes of the sequence with which a waiting request would begin.

        The hashes stay with the request, for the next search and for the engine that gets it.
        """
        found, sequence = Prefixes(), request.unfinished[0]
        for shelf in self._shelves.values():
            if may_skip_prefix(shelf.config, sequence):
                self._search(shelf, request, sequence, found)
        return found

    def _search(self, shelf: _Shelf, request: Request, sequence: Sequence, found: Prefixes) -> None:
        config = shelf.config
        chain = sequence.chains.setdefault(config.hash_kind, [])
        num_blocks = min(num_findable_blocks(config, sequence), MAX_BLOCKS)
        if config.sliding_window is None:
            masks = self._masks_ahead(shelf, request, sequence, chain, num_blocks)
            hits = walk_run(masks, shelf.places)
        else:
            self._names.grow_chain(chain, config, request, sequence.token_ids, num_blocks)
            known = [shelf.masks.get(name, 0) for name in chain[1 : num_blocks + 1]]
            hits = walk_windows(known, shelf.places, config)
        longest = 0
        for places, num_found, num_from_host in hits:
            longest = max(longest, num_found)
            numbers = [shelf.numbers[place] for place in places_in(places)]
            found.add(numbers, num_found * config.block_size, num_from_host)
        if longest + 1 < len(chain):
            found.family = int.from_bytes(chain[longest + 1][:8], "little")

    def _masks_ahead(
        self,
        shelf: _Shelf,
        request: Request,
        sequence: Sequence,
        chain: list[bytes],
        num_blocks: int,
    ) -> Iterator[list[int]]:
        """Yields masks of the blocks of a request part by part; hashes only consumed parts."""
        mask_of, config, token_ids = shelf.masks.get, shelf.config, sequence.token_ids
        for start in range(0, num_blocks, RUN_BLOCKS):
            end = min(num_blocks, start + RUN_BLOCKS)
            if len(chain) <= end:
                self._names.grow_chain(chain, config, request, token_ids, end)
            yield [mask_of(name, 0) for name in chain[start + 1 : end + 1]]


# -- Prefix lengths of all executors, from block masks ---------------------------------------------
#
# A mask of a block has `NUM_BITS` bits for each executor: whether the block is on its device, and
# whether it is in its host pool. A set of executors is a mask of their device bits.

DEVICE_BIT, HOST_BIT = 1, 2
NUM_BITS = 2
# Number of set bits from which looking at every bit is quicker than jumping between set bits.
_MANY = 8


class CachedPrefix(NamedTuple):
    """Cached prefix of `num_tokens` tokens, with `num_host_blocks` blocks in the host pool only."""

    num_tokens: int
    num_host_blocks: int


class PrefixMatch(NamedTuple):
    """Executors (`places`) that have `num_blocks` cached, `num_host_blocks` on the host only."""

    places: int
    num_blocks: int
    num_host_blocks: int


def places_in(places: int) -> list[int]:
    """Returns the places whose device bits are set."""
    if places.bit_count() > _MANY:
        bits = bin(places)[:1:-NUM_BITS]
        return [place for place, bit in enumerate(bits) if bit == "1"]
    found = []
    while places:
        lowest = places & -places
        found.append((lowest.bit_length() - 1) // NUM_BITS)
        places ^= lowest
    return found


def walk_run(parts: Iterable[list[int]], places: int) -> list[PrefixMatch]:
    """Returns the length of the cached prefix at each executor, except where it is empty.

    `parts`: masks of the blocks from the first on, a few at a time; read as long as some executor
    has all blocks so far.
    """
    found: list[PrefixMatch] = []
    # Executors that have all blocks so far, by the number of blocks in their host pool only.
    alive = {0: places}
    # Run of equal masks, from block `begin` on.
    same, begin, end = -1, 0, 0
    for part in parts:
        # Mostly all masks of a part are equal, which is checked quickly.
        is_even = part.count(part[0]) == len(part)
        for index, mask in enumerate(part[:1] if is_even else part, end):
            if mask != same:
                alive = _go_on(alive, same, index - begin)
                same, begin = mask, index
                _cut(alive, (mask | mask >> 1) & places, index, found)
                if not alive:
                    return found
        end += len(part)
    if end:
        _cut(_go_on(alive, same, end - begin), 0, end, found)
    return found


def _go_on(alive: dict[int, int], mask: int, num_blocks: int) -> dict[int, int]:
    """Advances executors by `num_blocks` blocks that all have this mask."""
    only_host = mask >> 1 & ~mask
    if not num_blocks or not any(have & only_host for have in alive.values()):
        return alive
    counted: dict[int, int] = {}
    for num_host, have in alive.items():
        for number, part in (
            (num_host + num_blocks, have & only_host),
            (num_host, have & ~only_host),
        ):
            if part:
                counted[number] = counted.get(number, 0) | part
    return counted


def _cut(alive: dict[int, int], holders: int, num_blocks: int, found: list[PrefixMatch]) -> None:
    """Moves executors of `alive` that do not hold the next block to `found`."""
    for num_host, have in list(alive.items()):
        lost = have & ~holders
        if lost and num_blocks:
            found.append(PrefixMatch(lost, num_blocks, num_host))
        if lost == have:
            del alive[num_host]
        else:
            alive[num_host] = have & holders


def walk_windows(masks: list[int], places: int, config: SchedulerConfig) -> list[PrefixMatch]:
    """Returns the end of the last fully cached sliding window (of `config`) at each executor.

    In a `PrefixMatch`, `num_blocks` is the end of that window; the blocks before the window are not
    needed.
    """
    found: list[PrefixMatch] = []
    # Executors that have the window back to `index`, by (end of the window, blocks of it in the
    # host pool only).
    searching = {(len(masks), 0): places}
    index = len(masks) - 1
    while searching:
        for (end, num_host), have in list(searching.items()):
            if index < first_block_needed(config, end * config.block_size):
                del searching[end, num_host]
                if end:
                    found.append(PrefixMatch(have, end, num_host))
        if searching:
            searching = _step_back(searching, masks[index], index)
            index -= 1
    return found


def _step_back(
    searching: dict[tuple[int, int], int], mask: int, index: int
) -> dict[tuple[int, int], int]:
    """Extends windows back over block `index`; returns executors by window, as in `walk_windows`.

    An executor without the block continues with a window that ends before the block.
    """
    further: dict[tuple[int, int], int] = {}
    only_host = mask >> 1 & ~mask
    holders = mask | mask >> 1
    for (end, num_host), have in searching.items():
        for key, part in (
            ((end, num_host), have & mask),
            ((end, num_host + 1), have & only_host),
            ((index, 0), have & ~holders),
        ):
            if part:
                further[key] = further.get(key, 0) | part
    return further
