"""Fair sharing: queues with turns of tenants, bounded places, and shares of a resource."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """Queue in which tenants take turns; items of one tenant stay in order."""

    def __init__(self) -> None:
        # The first tenant is next. Items are keys of the inner dictionaries, so each occurs once.
        self._waiting: OrderedDict[str, dict[_Item, None]] = OrderedDict()
        self._some_wait = asyncio.Event()

    def put(self, tenant: str, item: _Item) -> None:
        """Appends an item to its tenant's items.

        A tenant without waiting items joins as the last.
        """
        self._waiting.setdefault(tenant, {})[item] = None
        self._some_wait.set()

    async def take(self) -> _Item:
        """Waits for an item; removes and returns it."""
        while (item := self.take_now()) is None:
            self._some_wait.clear()
            await self._some_wait.wait()
        return item

    def take_now(self) -> _Item | None:
        """Removes and returns the next item; None if none waits."""
        if not self._waiting:
            return None
        tenant, items = self._waiting.popitem(last=False)
        item = next(iter(items))
        del items[item]
        if items:
            self._waiting[tenant] = items
        return item

    def discard(self, tenant: str, item: _Item) -> bool:
        """Removes an item. Returns whether the item was waiting."""
        items = self._waiting.get(tenant, {})
        if item not in items:
            return False
        del items[item]
        if not items:
            del self._waiting[tenant]
        return True


# -- Places with a bounded waiting queue -----------------------------------------------------------


class TooManyWait(Exception):
    """Waiting queue has no room for this party."""


class FairSemaphore:
    """`num_places` concurrent places, and a waiting queue of `max_waiting`.

    A single party may hold all places. If several parties wait, they take turns for the next free
    place, however many requests of one party wait. Each party leaves a share of the queue to
    others.
    """

    def __init__(self, num_places: int, max_waiting: int) -> None:
        self._num_free = num_places
        self._queue = Shares(max_waiting)
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests of all parties."""
        return self._queue.num_held

    @asynccontextmanager
    async def place(
        self, party: str | None, patience_s: float | None = None
    ) -> AsyncIterator[None]:
        """Holds a place within the `with`; waits at most `patience_s` for it.

        `party`: None if unknown. Raises TooManyWait and TimeoutError.
        """
        await self._take(party, patience_s)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, party: str | None, patience_s: float | None) -> None:
        # A released place goes to a waiting request first, so none waits while a place is free.
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
                # The place was granted at the moment of leaving: pass it on.
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


# -- Shares of a bounded resource (places, bytes) --------------------------------------------------
#
# The number of parties is unknown, so no party gets a fixed part. A party may take more while it
# holds at most `HELD_PER_LEFT` times what it leaves free. A greedy party leaves a seventeenth to
# others, and a party that holds nothing may take anything that is free. Schedulers use this rule.

HELD_PER_LEFT = 16


class Shares:
    """Bounded resource of `num_all` units, with units held by party.

    `num_held`: units held by all.
    """

    def __init__(self, num_all: int) -> None:
        self.num_all = num_all
        self.num_held = 0
        self._held_by: dict[str, int] = {}

    def may_take(self, party: str | None, num: int) -> bool:
        """Returns whether `party` may take `num` more.

        None: parties are unknown and may take everything.
        """
        num_left = self.num_all - self.num_held - num
        if num_left < 0:
            return False
        held = 0 if party is None else self._held_by.get(party, 0)
        return held <= HELD_PER_LEFT * num_left or held == 0

    def take(self, party: str | None, num: int) -> None:
        """Takes `num` units for `party`. Call only after `may_take` has allowed it."""
        self.num_held += num
        if party is not None:
            self._held_by[party] = self._held_by.get(party, 0) + num

    def give_back(self, party: str | None, num: int) -> None:
        """Returns `num` units that `party` took."""
        self.num_held -= num
        if party is not None:
            self._held_by[party] -= num
            if not self._held_by[party]:
                # Parties that hold nothing are forgotten, to bound memory.
                del self._held_by[party]
