"""Loading of adapters at one executor, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from scheduler_service.executors.executor_link import AdapterNotLoaded, Link
from scheduler_service.scheduler import effects, events
from splitserve.executor.v1 import executor_pb2 as executor

# Pause before a call is repeated that the network cut.
RETRY_PAUSE_S = 0.5

_log = logging.getLogger(__name__)


class AdapterSources(Protocol):
    """Finds the files of adapters that requests have."""

    def source(self, reference: str) -> tuple[Path, str, int] | None:
        """Returns path, digest and size in bytes of an adapter; None if no request has it."""
        ...


class AdapterLoader:
    """Makes the LoadAdapter calls to one life of an executor, in order, and reports their ends."""

    def __init__(
        self,
        link: Link,
        scheduler_epoch: int,
        sources: AdapterSources,
        report: Callable[[events.AdapterLoaded], None],
    ) -> None:
        self._link = link
        self._scheduler_epoch = scheduler_epoch
        self._sources = sources
        self._report = report
        self._waiting: asyncio.Queue[effects.LoadAdapter] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._ends: dict[str, asyncio.Future[str]] = {}

    def load(self, effect: effects.LoadAdapter) -> None:
        """Queues the loading of an adapter; the executor loads one at a time."""
        self._waiting.put_nowait(effect)
        if self._task is None:
            loading: Coroutine[Any, Any, None] = self._run()
            self._task = asyncio.get_running_loop().create_task(loading)

    def ended(self, adapter: str) -> asyncio.Future[str]:
        """Returns the end of a load that goes on: why the adapter cannot be loaded, else empty.

        If the executor is lost meanwhile, the reason is empty, too.
        """
        end = self._ends.setdefault(adapter, asyncio.get_running_loop().create_future())
        return asyncio.shield(end)

    def close(self) -> None:
        """Ends all calls; nothing is reported any more."""
        if self._task is not None:
            self._task.cancel()
        for adapter in list(self._ends):
            self._tell(adapter, "")

    def _tell(self, adapter: str, why_not: str) -> None:
        end = self._ends.pop(adapter, None)
        if end is not None:
            end.set_result(why_not)

    async def _run(self) -> None:
        while True:
            effect = await self._waiting.get()
            why_not = await self._load(effect)
            if why_not:
                _log.warning(
                    "adapter_not_loaded address=%s adapter=%s reason=%r",
                    effect.address,
                    effect.adapter,
                    why_not,
                )
            self._report(events.AdapterLoaded(effect.address, effect.adapter, why_not))
            self._tell(effect.adapter, why_not)

    async def _load(self, effect: effects.LoadAdapter) -> str:
        """Returns why the adapter could not be loaded; empty if it is loaded."""
        while True:
            found = self._sources.source(effect.adapter)
            if found is None:
                return "its files are gone: no request has it any more"
            path, digest, num_bytes = found
            source = executor.AdapterSource(
                name=effect.adapter, digest=digest, path=str(path), num_bytes=num_bytes
            )
            request = executor.LoadAdapterRequest(
                scheduler_epoch=self._scheduler_epoch,
                executor_epoch=self._link.info.executor_epoch,
                adapter=source,
                kept_adapters=effect.kept,
            )
            try:
                await self._link.load_adapter(request)
            except AdapterNotLoaded as error:
                if error.is_final:
                    return str(error) or "the executor gives no reason"
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return ""
