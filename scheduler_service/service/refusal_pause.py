"""Who is refused again and again is read more slowly: refusals take time from others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

_FIRST_S = 0.01
_MOST_S = 0.1

Sleep = Callable[[float], Awaitable[object]]


class RefusalPauses:
    """Those of all Sessions: one for each tenant, however many Sessions it has."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        # Kept by the Sessions that are open.
        self._of: WeakValueDictionary[str, RefusalPause] = WeakValueDictionary()

    def of(self, tenant: str | None) -> RefusalPause:
        """For a Session of `tenant`; None: of many, or of nobody knows whom, which never pauses."""
        if tenant is None:
            return RefusalPause(None)
        pause = self._of.get(tenant)
        if pause is None:
            pause = self._of[tenant] = RefusalPause(self._sleep)
        return pause


class RefusalPause:
    """Of one tenant, whose Sessions make it one after the other. `sleep`: None never to pause."""

    def __init__(self, sleep: Sleep | None) -> None:
        self._sleep = sleep
        self._next_s = _FIRST_S
        self._turn = asyncio.Lock()

    async def after(self, refusal_reason: str | None) -> None:
        """Pauses after a submit that was refused for its tenant's quota; None: it was not."""
        if refusal_reason is None:
            self._next_s = _FIRST_S
        elif refusal_reason == "QUOTA_EXCEEDED" and self._sleep is not None:
            async with self._turn:
                pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MOST_S)
                await self._sleep(pause_s)
