"""Items in the order of the keys they were queued with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = tuple[int, ...]
Item = TypeVar("Item", bound=Hashable)

BEFORE_ALL: Key = ()


class OrderedQueue(Generic[Item]):
    """Items by key, smallest first; keys are unique.

    It remembers each item's key, so what becomes of the item while it is here does not move it.
    `add` and `remove` cost a binary search and a move of pointers, the rest a binary search.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._items: list[Item] = []
        self._key_of: dict[Item, Key] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._key_of

    def add(self, item: Item, key: Key) -> None:
        """Adds `item`, which is not here, at the place of `key`."""
        index = bisect_left(self._keys, key)
        assert item not in self._key_of, "queued twice"
        assert self._keys[index : index + 1] != [key], "two items with one key"
        self._keys.insert(index, key)
        self._items.insert(index, item)
        self._key_of[item] = key

    def remove(self, item: Item) -> None:
        """Removes `item`, which must be here."""
        index = bisect_left(self._keys, self._key_of.pop(item))
        del self._keys[index], self._items[index]

    def first(self) -> Item | None:
        """The item with the smallest key, or None."""
        return self._items[0] if self._items else None

    def after(self, key: Key) -> tuple[Key, Item] | None:
        """The first item whose key is above `key`, with its key, or None."""
        index = bisect_right(self._keys, key)
        return (self._keys[index], self._items[index]) if index < len(self._keys) else None
