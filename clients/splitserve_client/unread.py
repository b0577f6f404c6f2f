"""Limits of unread bytes, per reader and for all readers together (ADR 11)."""

from __future__ import annotations

from typing import Protocol

DEFAULT_UNREAD_BYTES = 16 * 2**20
# Total limit, as a multiple of the limit of one reader.
_NUM_UNREAD = 16


class Holder(Protocol):
    """Reader with unread bytes."""

    @property
    def num_unread_bytes(self) -> int:
        """Number of unread bytes."""
        ...

    def drop_unread(self) -> None:
        """Ends the stream with StreamNotRead and releases its unread bytes."""
        ...


class UnreadBudget:
    """Limits the unread bytes of each holder, and of all holders together."""

    def __init__(self, max_bytes: int = DEFAULT_UNREAD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_total_bytes = _NUM_UNREAD * max_bytes
        self.num_bytes = 0
        self._holders: set[Holder] = set()

    def count(self, holder: Holder, num_bytes: int) -> None:
        """Adds `num_bytes` of `holder`; negative for bytes that were read or dropped."""
        self.num_bytes += num_bytes
        if not holder.num_unread_bytes:
            self._holders.discard(holder)
        elif num_bytes > 0:
            self._holders.add(holder)

    def enforce(self) -> None:
        """Drops the holders with the most unread bytes until the total is within its limit."""
        while self.num_bytes > self.max_total_bytes:
            max(self._holders, key=lambda holder: holder.num_unread_bytes).drop_unread()
