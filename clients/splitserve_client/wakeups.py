"""Batched wake-ups of the readers of a session."""

from __future__ import annotations

import asyncio
from typing import Protocol

# Delay that no reader notices.
_SHORT_ROUND_S = 0.01
_MAX_PAUSE_S = 0.1


class Reader(Protocol):
    """Reader that may wait for events."""

    def wake(self) -> None:
        """Wakes the waiting reader, if any."""
        ...


class Wakeups:
    """Wakes readers, once each for all events that have arrived.

    After a slow round of readers, the next round is delayed by about as long: more events have then
    arrived for each reader, and handling them together costs little more than one token.
    """

    def __init__(self) -> None:
        self._readers: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._round_s = 0.0

    def add(self, reader: Reader) -> None:
        """Notes that `reader` has new events."""
        self._readers[reader] = None

    def flush(self) -> None:
        """Wakes all noted readers, now or after a pause."""
        if not self._readers or self._timer is not None:
            return
        if self._round_s <= _SHORT_ROUND_S:
            self._wake()
        else:
            pause_s = min(self._round_s, _MAX_PAUSE_S)
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        readers, self._readers = self._readers, {}
        for reader in readers:
            reader.wake()
        # Runs after the readers have run.
        loop.call_soon(self._end_round, start_s)

    def _end_round(self, start_s: float) -> None:
        self._round_s = asyncio.get_running_loop().time() - start_s
