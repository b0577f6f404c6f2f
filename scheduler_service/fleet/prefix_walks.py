"""How much of a prefix each executor has, from masks that say who has each of its blocks.

A mask has `NUM_BITS` bits for each executor: whether the block is on its device, and whether it is
in its host pool. A set of executors is a mask of their device bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler_service.core.blocks.prefix_cache import first_block_needed
from scheduler_service.core.config import SchedulerConfig

DEVICE_BIT, HOST_BIT = 1, 2
NUM_BITS = 2
# Of so many it is quicker to look at each bit than to go from one to the next.
_MANY = 8


class CachedPrefix(NamedTuple):
    """The KV of the first `num_tokens` exists; `num_host_blocks` of it have to be brought back."""

    num_tokens: int
    num_host_blocks: int


class Found(NamedTuple):
    """These executors have so many blocks of a prefix, so many of them in the host pool only."""

    places: int
    num_blocks: int
    num_host_blocks: int


def places_in(places: int) -> list[int]:
    """The places whose device bits are set."""
    if places.bit_count() > _MANY:
        bits = bin(places)[:1:-NUM_BITS]
        return [place for place, bit in enumerate(bits) if bit == "1"]
    found = []
    while places:
        lowest = places & -places
        found.append((lowest.bit_length() - 1) // NUM_BITS)
        places ^= lowest
    return found


def walk_run(parts: Iterable[Sequence[int]], places: int) -> list[Found]:
    """Who has a run of the first blocks, and how long it is; nobody of whom it is empty.

    `parts`: masks of the blocks, from the first on, some at a time; asked for as long as anybody
    has all.
    """
    found: list[Found] = []
    # Who has all so far, by how many of them are in its host pool only.
    alive = {0: places}
    # Blocks in a row that the same executors have, since the `begin`-th.
    same, begin, end = -1, 0, 0
    for part in parts:
        # Mostly the same executors have all of it, and that is quickly seen.
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
    """So many blocks further, all of which have this mask."""
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


def _cut(alive: dict[int, int], holders: int, num_blocks: int, found: list[Found]) -> None:
    """Those of `alive` that do not hold the next block are found."""
    for num_host, have in list(alive.items()):
        lost = have & ~holders
        if lost and num_blocks:
            found.append(Found(lost, num_blocks, num_host))
        if lost == have:
            del alive[num_host]
        else:
            alive[num_host] = have & holders


def walk_windows(masks: Sequence[int], places: int, config: SchedulerConfig) -> list[Found]:
    """Who has a whole window, and how far it reaches at most: the sliding window of `config`.

    Of a `Found`, `num_blocks` is the end of that window; the blocks before it are not needed.
    """
    found: list[Found] = []
    # By (end of the window, blocks of it in the host pool only): who has it back to `index`.
    searching = {(len(masks), 0): places}
    index = len(masks) - 1
    while searching:
        for (end, num_host), have in list(searching.items()):
            if index < first_block_needed(config, end * config.block_size):
                del searching[end, num_host]
                if end:
                    found.append(Found(have, end, num_host))
        if searching:
            searching = _step_back(searching, masks[index], index)
            index -= 1
    return found


def _step_back(
    searching: dict[tuple[int, int], int], mask: int, index: int
) -> dict[tuple[int, int], int]:
    """Who goes on with which window when block `index` is looked at."""
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
