"""When those who wait for a session's tokens are woken."""

from __future__ import annotations

import asyncio
from typing import Protocol

# Rounds that take no longer than this are not noticed by anybody.
_SHORT_ROUND_S = 0.01
_MAX_PAUSE_S = 0.1


class Reader(Protocol):
    """Somebody may wait here."""

    def wake(self) -> None:
        """Lets whoever waits go on."""
        ...


class Wakeups:
    """Wakes readers, each once for all that has come.

    While a round of readers takes long, the next one waits about as long: more has come by then for
    each of them, and to handle it together costs little more than to handle one token.
    """

    def __init__(self) -> None:
        self._readers: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._round_s = 0.0

    def add(self, reader: Reader) -> None:
        """Something has come for `reader`."""
        self._readers[reader] = None

    def flush(self) -> None:
        """Wakes all that were added, now or soon."""
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
        # Runs when they have run.
        loop.call_soon(self._end_round, start_s)

    def _end_round(self, start_s: float) -> None:
        self._round_s = asyncio.get_running_loop().time() - start_s
