"""Sorted queue of items by key, divided into lanes, and the lanes of waiting requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeAlias, TypeVar

from scheduler_service.scheduler.values import Request

Key: TypeAlias = tuple[int, ...]
Item = TypeVar("Item", bound=Hashable)

BEFORE_ALL: Key = ()
# Largest piece of a sorted list; bounds the cost of an insertion.
_MAX_PIECE = 512


class _Sorted(Generic[Item]):
    """Keys and items in pieces, smallest key first. No piece is empty.

    `_lasts`: last key of each piece.
    """

    def __init__(self) -> None:
        self._lasts: list[Key] = []
        self._keys: list[list[Key]] = []
        self._items: list[list[Item]] = []

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._items)

    def add(self, item: Item, key: Key) -> None:
        if not self._keys:
            self._keys.append([key])
            self._items.append([item])
            self._lasts.append(key)
            return
        piece = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        keys = self._keys[piece]
        index = bisect_left(keys, key)
        assert index == len(keys) or keys[index] != key, "duplicate key"
        keys.insert(index, key)
        self._items[piece].insert(index, item)
        self._lasts[piece] = keys[-1]
        if len(keys) > _MAX_PIECE:
            self._split(piece)

    def remove(self, key: Key) -> None:
        piece = bisect_left(self._lasts, key)
        keys = self._keys[piece]
        index = bisect_left(keys, key)
        del keys[index], self._items[piece][index]
        if keys:
            self._lasts[piece] = keys[-1]
        else:
            del self._keys[piece], self._items[piece], self._lasts[piece]

    def after(self, key: Key) -> tuple[Key, Item] | None:
        piece = bisect_right(self._lasts, key)
        if piece == len(self._lasts):
            return None
        index = bisect_right(self._keys[piece], key)
        return self._keys[piece][index], self._items[piece][index]

    def _split(self, piece: int) -> None:
        middle = _MAX_PIECE // 2
        keys, items = self._keys[piece], self._items[piece]
        self._keys[piece : piece + 1] = keys[:middle], keys[middle:]
        self._items[piece : piece + 1] = items[:middle], items[middle:]
        self._lasts.insert(piece, keys[middle - 1])


class OrderedQueue(Generic[Item]):
    """Items by key, smallest first; keys are unique. Each item is in one lane.

    The queue remembers each item's key, so later changes of the item do not move it. Every
    operation costs binary searches and the move of a few hundred pointers, however many items there
    are.
    """

    def __init__(self) -> None:
        # Annotated, not subscripted: checkpoints cannot store type arguments.
        self._all: _Sorted[Item] = _Sorted()
        self._by_lane: dict[Lane, _Sorted[Item]] = {}
        self._positions: dict[Item, tuple[Lane, Key]] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._all)

    def __contains__(self, item: Item) -> bool:
        return item in self._positions

    def lane_of(self, item: Item) -> Lane:
        """Returns the lane of `item`, which must be queued."""
        return self._positions[item][0]

    def add(self, item: Item, lane: Lane, key: Key) -> None:
        """Adds `item`, which must not be queued."""
        assert item not in self._positions, "queued twice"
        self._positions[item] = lane, key
        self._all.add(item, key)
        self._by_lane.setdefault(lane, _Sorted()).add(item, key)

    def remove(self, item: Item) -> None:
        """Removes `item`, which must be queued."""
        lane, key = self._positions.pop(item)
        self._all.remove(key)
        self._remove_from(lane, key)

    def _remove_from(self, lane: Lane, key: Key) -> None:
        self._by_lane[lane].remove(key)
        if not self._by_lane[lane]:
            del self._by_lane[lane]

    def change_lane(self, item: Item, lane: Lane) -> None:
        """Moves `item`, which must be queued, to another lane; its key stays."""
        old, key = self._positions[item]
        self._positions[item] = lane, key
        self._remove_from(old, key)
        self._by_lane.setdefault(lane, _Sorted()).add(item, key)

    def first(self) -> Item | None:
        """Returns the item with the smallest key; None for an empty queue."""
        entry = self._all.after(BEFORE_ALL)
        return None if entry is None else entry[1]

    def after(self, key: Key, lanes: Lanes = None) -> tuple[Key, Item] | None:
        """Returns the first key above `key` in these lanes, with its item; None without one."""
        if lanes is None:
            return self._all.after(key)
        open_lanes = (self._by_lane[lane] for lane in lanes if lane in self._by_lane)
        entries = [entry for lane in open_lanes if (entry := lane.after(key)) is not None]
        return min(entries, key=_key_of, default=None)


def _key_of(entry: tuple[Key, Item]) -> Key:
    return entry[0]


# -- Lanes of the waiting queue: requests by group and adapter -------------------------------------
#
# With lanes, an engine skips at once any number of requests that it cannot begin: requests that do
# not fit it, and requests whose adapter has no slot there.

# Group (the kinds of engines that its requests fit) and adapter.
Lane: TypeAlias = tuple[str, str]
# Lanes to look at; None for all lanes.
Lanes: TypeAlias = Collection[Lane] | None


@dataclass(slots=True)
class OpenLanes:
    """Adapters and groups whose requests a reader wants to see; None for all.

    `closed_adapters`: those of `adapters` that the reader does not want to see. The reader may
    change all of them between two requests.
    """

    adapters: Collection[str] | None = None
    groups: Collection[str] | None = None
    closed_adapters: Collection[str] = ()


class WaitingLanes:
    """Lanes of all waiting requests."""

    def __init__(self) -> None:
        self._lanes: dict[Request, Lane] = {}
        self._num_in = Counter[Lane]()
        self._num_of_group = Counter[str]()

    def put(self, request: Request, group: str) -> None:
        """Puts a request into the lane of this group and its adapter; moves it if it has a lane."""
        if request in self._lanes:
            self.remove(request)
        lane = group, request.scheduling.adapter
        self._lanes[request] = lane
        self._num_in[lane] += 1
        self._num_of_group[group] += 1

    def remove(self, request: Request) -> None:
        """Forgets a request that does not wait any more."""
        lane = self._lanes.pop(request)
        self._num_in[lane] -= 1
        if not self._num_in[lane]:
            del self._num_in[lane]
        self._num_of_group[lane[0]] -= 1
        if not self._num_of_group[lane[0]]:
            del self._num_of_group[lane[0]]

    def of(self, request: Request) -> Lane:
        """Returns the lane of a waiting request."""
        return self._lanes[request]

    def num_of_adapters(self) -> Counter[str]:
        """Returns the number of waiting requests of each adapter, empty for none."""
        numbers = Counter[str]()
        for (_, adapter), number in self._num_in.items():
            numbers[adapter] += number
        return numbers

    def select(self, open_lanes: OpenLanes) -> Lanes:
        """Returns the lanes that are open; None for all lanes."""
        adapters, groups = open_lanes.adapters, open_lanes.groups
        closed = open_lanes.closed_adapters
        if adapters is None:
            if groups is None and not closed:
                return None
            return [
                lane
                for lane in self._num_in
                if (groups is None or lane[0] in groups) and lane[1] not in closed
            ]
        groups = self._num_of_group if groups is None else groups
        wanted = [adapter for adapter in adapters if adapter not in closed]
        return [(group, adapter) for group in groups for adapter in wanted]
