"""A few places for many who want one: parties take turns, and those who wait are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitserve_gateway.sharing.shares import Shares
from splitserve_gateway.sharing.turns import Turns


class TooManyWait(Exception):
    """There is no room to wait in, for this party."""


class TurnPlaces:
    """`num_places`, and a queue of `max_waiting` before them.

    Whoever comes alone may have all places; where others wait, the next that is free is theirs in
    turn, however many wait of one party. Each leaves some of the queue to others.
    """

    def __init__(self, num_places: int, max_waiting: int) -> None:
        self._num_free = num_places
        self._queue = Shares(max_waiting)
        self._waiting: Turns[asyncio.Future[None]] = Turns()

    @property
    def num_waiting(self) -> int:
        """How many, of all."""
        return self._queue.num_held

    @asynccontextmanager
    async def place(
        self, party: str | None, patience_s: float | None = None
    ) -> AsyncIterator[None]:
        """Holds one. `party`: None if none is known. Raises TooManyWait and TimeoutError."""
        await self._take(party, patience_s)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, party: str | None, patience_s: float | None) -> None:
        # Whoever gives one back hands it to those who wait, so nobody does while one is free.
        if self._num_free:
            self._num_free -= 1
            return
        if not self._queue.may_take(party, 1):
            raise TooManyWait
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.take(party, 1)
        self._waiting.put(party or "", turn)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except BaseException:
            self._waiting.discard(party or "", turn)
            if turn.done() and not turn.cancelled():
                # It was this one's turn at the moment when it left.
                self._give_back()
            raise
        finally:
            self._queue.give_back(party, 1)

    def _give_back(self) -> None:
        while (turn := self._waiting.take_now()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
