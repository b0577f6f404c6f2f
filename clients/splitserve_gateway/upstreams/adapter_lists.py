"""Adapters that one scheduler has registered, as its callers may use them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from splitserve_client import Adapter, SplitserveError

# Age from which a list is read again.
_FRESH_S = 1.0
# Limit of all cached lists together; a list counts as one adapter more than it has.
_MAX_CACHED = 100_000

# Returns the adapters that the owner of a credential may use; empty: callers have none.
ListAdapters = Callable[[str], Awaitable[Sequence[Adapter]]]
Listed = Mapping[str, Adapter]


class AdapterLists:
    """Caches the adapters that each caller may use, by name."""

    def __init__(
        self, list_adapters: ListAdapters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._list_adapters = list_adapters
        self._clock = clock
        # Time and list by credential, least recently read first.
        self._lists: OrderedDict[str, tuple[float, Listed]] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Listed]] = {}

    async def read(self, credential: str, name: str | None = None) -> Listed:
        """Returns the adapters that the owner of `credential` may use.

        A list that is too old is read again. `name`: an old list is enough if it has this name, and
        is read again in the background. If the scheduler does not answer, the old list stays.
        """
        at_s, listed = self._lists.get(credential, (-math.inf, {}))
        if self._clock() - at_s < _FRESH_S:
            return listed
        reading = self._reading.get(credential)
        if reading is None:
            reading = asyncio.create_task(self._read(credential))
            self._reading[credential] = reading
        # The first reader may be cancelled; the others still need the list.
        return listed if name in listed else await asyncio.shield(reading)

    def forget(self) -> None:
        """Forgets all lists, because adapters were loaded or unloaded."""
        self._lists.clear()

    async def close(self) -> None:
        """Ends the reading of lists."""
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, credential: str) -> Listed:
        try:
            listed: Listed = {each.name: each for each in await self._list_adapters(credential)}
        except SplitserveError:
            _, listed = self._lists.get(credential, (0.0, {}))
        finally:
            del self._reading[credential]
        self._lists[credential] = self._clock(), listed
        self._lists.move_to_end(credential)
        num_cached = sum(1 + len(cached) for _, cached in self._lists.values())
        while num_cached > _MAX_CACHED and len(self._lists) > 1:
            _, (_, dropped) = self._lists.popitem(last=False)
            num_cached -= 1 + len(dropped)
        return listed
