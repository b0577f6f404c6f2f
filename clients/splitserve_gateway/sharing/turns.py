"""Who is next where many wait: one of each tenant in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
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
