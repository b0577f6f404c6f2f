"""Items in the order of the keys they were queued with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import chain
from typing import Generic, TypeVar

from scheduler_service.core.request import Request

Key = tuple[int, ...]
# The lanes that a reader wants to see; None for all.
Lanes = Collection[str] | None
# The lane that a request is in.
LaneOf = Callable[[Request], str]
Item = TypeVar("Item", bound=Hashable)

BEFORE_ALL: Key = ()
# Items are kept in pieces of at most that many, so that none costs a move of all others.
_MAX_PIECE = 512


def all_lanes() -> Lanes:
    """None of the lanes is closed."""
    return None


def lane_of_adapter(request: Request) -> str:
    """Requests are apart by their adapters."""
    return request.scheduling.adapter


class _Sorted(Generic[Item]):
    """Keys and items in pieces, smallest first. No piece is empty. `lasts`: each piece's last."""

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
        assert index == len(keys) or keys[index] != key, "two items with one key"
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
    """Items by key, smallest first; keys are unique. Each item has a key in each of its lanes.

    It remembers each item's key, so what becomes of the item while it is here does not move it.
    Everything costs binary searches and the move of a few hundred pointers, however many there are.
    """

    def __init__(self) -> None:
        # Annotated, not subscripted: a checkpoint has no place for type arguments.
        self._all: _Sorted[Item] = _Sorted()
        self._by_lane: dict[str, _Sorted[Item]] = {}
        self._keys_of: dict[Item, Mapping[str, Key]] = {}

    def __len__(self) -> int:
        return len(self._keys_of)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._all)

    def __contains__(self, item: Item) -> bool:
        return item in self._keys_of

    def add(self, item: Item, keys: Mapping[str, Key]) -> None:
        """Adds `item`, which is not here. `keys`: by lane; where all are read, the least counts."""
        assert item not in self._keys_of, "queued twice"
        self._keys_of[item] = keys
        self._all.add(item, min(keys.values()))
        for lane, key in keys.items():
            self._by_lane.setdefault(lane, _Sorted()).add(item, key)

    def remove(self, item: Item) -> None:
        """Removes `item`, which must be here."""
        keys = self._keys_of.pop(item)
        self._all.remove(min(keys.values()))
        for lane, key in keys.items():
            self._remove_from(lane, key)

    def _remove_from(self, lane: str, key: Key) -> None:
        self._by_lane[lane].remove(key)
        if not self._by_lane[lane]:
            del self._by_lane[lane]

    def change_lane(self, item: Item, lane: str) -> None:
        """`item`, which is here in one lane, is in another from now on, at the same place."""
        ((old, key),) = self._keys_of[item].items()
        self._keys_of[item] = {lane: key}
        self._remove_from(old, key)
        self._by_lane.setdefault(lane, _Sorted()).add(item, key)

    def firsts(self) -> Mapping[str, Item]:
        """The first item of each lane."""
        return {lane: next(iter(items)) for lane, items in self._by_lane.items()}

    def first(self) -> Item | None:
        """The item with the smallest key, or None."""
        entry = self._all.after(BEFORE_ALL)
        return entry[1] if entry is not None else None

    def after(self, key: Key, lanes: Lanes = None) -> tuple[Key, Item] | None:
        """The first item whose key is above `key`, with its key, or None; of these lanes only."""
        if lanes is None:
            return self._all.after(key)
        open_lanes = (self._by_lane[lane] for lane in lanes if lane in self._by_lane)
        entries = [entry for lane in open_lanes if (entry := lane.after(key)) is not None]
        return min(entries, key=_key_of, default=None)


def _key_of(entry: tuple[Key, Item]) -> Key:
    return entry[0]
