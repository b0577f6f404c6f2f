"""Tasks that somebody began, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """Keeps each until it is done; a loop alone does not."""

    def __init__(self) -> None:
        # In order, so that the same happens each time that they are ended.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Its task, which may be cancelled by whoever wants."""
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        """Ends those that are left; whatever they raise is nobody's any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
