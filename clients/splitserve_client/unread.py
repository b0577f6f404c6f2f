"""How much may lie unread: by one reader, and by all of them together (ADR 12)."""

from __future__ import annotations

from typing import Protocol

DEFAULT_UNREAD_BYTES = 16 * 2**20
# So many readers' worth may lie unread in all.
_NUM_UNREAD = 16


class Holder(Protocol):
    """What is not read yet lies here."""

    @property
    def num_unread_bytes(self) -> int:
        """What it holds."""
        ...

    def drop_unread(self) -> None:
        """Ends it with StreamNotRead; what it held is given back."""
        ...


class UnreadBudget:
    """Bounds what each of its holders may hold, and all of them together."""

    def __init__(self, max_bytes: int = DEFAULT_UNREAD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_total_bytes = _NUM_UNREAD * max_bytes
        self.num_bytes = 0
        self._holders: set[Holder] = set()

    def count(self, holder: Holder, num_bytes: int) -> None:
        """Counts what `holder` got; below 0: what was read there, or dropped."""
        self.num_bytes += num_bytes
        if not holder.num_unread_bytes:
            self._holders.discard(holder)
        elif num_bytes > 0:
            self._holders.add(holder)

    def enforce(self) -> None:
        """While all hold too much together, whoever holds most is dropped."""
        while self.num_bytes > self.max_total_bytes:
            max(self._holders, key=lambda holder: holder.num_unread_bytes).drop_unread()
