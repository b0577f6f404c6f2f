"""Who is next where many wait: one of each tenant in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Turns(Generic[_Item]):
    """Items of tenants; those of one tenant come in their order."""

    def __init__(self) -> None:
        # The tenant that is next is the first one. Items are the keys, each is there once.
        self._waiting: OrderedDict[str, dict[_Item, None]] = OrderedDict()
        self._some_wait = asyncio.Event()

    def put(self, tenant: str, item: _Item) -> None:
        """Last of its tenant; a tenant of whom nothing waits is the last one."""
        self._waiting.setdefault(tenant, {})[item] = None
        self._some_wait.set()

    async def take(self) -> _Item:
        """Waits for one."""
        while (item := self.take_now()) is None:
            self._some_wait.clear()
            await self._some_wait.wait()
        return item

    def take_now(self) -> _Item | None:
        """None if none waits."""
        if not self._waiting:
            return None
        tenant, items = self._waiting.popitem(last=False)
        item = next(iter(items))
        del items[item]
        if items:
            self._waiting[tenant] = items
        return item

    def discard(self, tenant: str, item: _Item) -> bool:
        """Whether it waited; it does so no longer."""
        items = self._waiting.get(tenant, {})
        if item not in items:
            return False
        del items[item]
        if not items:
            del self._waiting[tenant]
        return True


# -- A few places for many who want one: parties take turns, and those who wait are bounded --------


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


# -- What parties may take of what there are only so many of: places, bytes ------------------------
#
# Nobody knows how many come, so nobody is given a fixed part. A party may take more as long as what
# it has is at most `HELD_PER_LEFT` times what it leaves. One that takes all it can leaves a
# seventeenth to others, and one that has nothing may take anything. Schedulers share by the same
# rule.

HELD_PER_LEFT = 16


class Shares:
    """So many of something, and who has how many of it. `num_held`: of all, now."""

    def __init__(self, num_all: int) -> None:
        self.num_all = num_all
        self.num_held = 0
        self._held_by: dict[str, int] = {}

    def may_take(self, party: str | None, num: int) -> bool:
        """Whether `party` may take `num` more. None: parties are not told apart, all is theirs."""
        num_left = self.num_all - self.num_held - num
        if num_left < 0:
            return False
        held = 0 if party is None else self._held_by.get(party, 0)
        return held <= HELD_PER_LEFT * num_left or held == 0

    def take(self, party: str | None, num: int) -> None:
        """It may."""
        self.num_held += num
        if party is not None:
            self._held_by[party] = self._held_by.get(party, 0) + num

    def give_back(self, party: str | None, num: int) -> None:
        """Of what it took."""
        self.num_held -= num
        if party is not None:
            self._held_by[party] -= num
            if not self._held_by[party]:
                # Nothing is kept of whoever has nothing.
                del self._held_by[party]
