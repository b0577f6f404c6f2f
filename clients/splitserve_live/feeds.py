"""Streams of frames for viewers of the live page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from splitserve.scheduler.v1.live_pb2 import WatchSchedulerResponse
from splitserve_client import AsyncClient, ClientConfig
from splitserve_common import Discovery
from splitserve_contract import DomainError
from splitserve_live.frames import SharedLines

# Limit of open feeds for all schedulers together; each scheduler has a limit of its own.
MAX_FEEDS = 16


class Feeds:
    """Asks schedulers with the viewer's credential; the page has no credential of its own."""

    def __init__(self, schedulers: Discovery, config: ClientConfig) -> None:
        """Prepares the feeds.

        `schedulers`: their addresses for operators. `config`: configuration of the connections.
        """
        self._schedulers = schedulers
        self._config = replace(config, api_key=None, api_key_file=None, follows_peers=False)
        self._shared = SharedLines(MAX_FEEDS)
        self._num_open = 0
        self._is_closed = asyncio.Event()

    async def addresses(self) -> list[str]:
        """Returns the addresses of the schedulers. Raises OSError."""
        return sorted(await self._schedulers.addresses())

    @asynccontextmanager
    async def open(
        self, scheduler: str, credential: str, frames_per_second: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Opens a stream of frames of one scheduler, as JSON lines; the first frame has arrived.

        Raises SplitserveError, OSError, DomainError(TOO_MANY_WATCHERS), and LookupError for an
        unknown scheduler.
        """
        async with (
            self._asking(scheduler, credential) as client,
            aclosing(client.watch(frames_per_second)) as frames,
        ):
            yield self._lines(await anext(frames), frames)

    async def life(self, scheduler: str, credential: str, request_id: str) -> dict[str, Any]:
        """Returns the recorded history of a request. Raises the errors of `open`."""
        async with self._asking(scheduler, credential) as client:
            return asdict(await client.explain(request_id))

    @asynccontextmanager
    async def _asking(self, scheduler: str, credential: str) -> AsyncIterator[AsyncClient]:
        """Yields a client of the scheduler at `scheduler`; of the first one if it is empty."""
        if self._num_open >= MAX_FEEDS:
            message = f"{self._num_open} viewers watch the page already; allowed: {MAX_FEEDS}"
            raise DomainError("TOO_MANY_WATCHERS", message)
        self._num_open += 1
        try:
            addresses = await self.addresses()
            if scheduler and scheduler not in addresses:
                message = f"scheduler is {scheduler!r}; allowed: {', '.join(addresses)}"
                raise LookupError(message)
            config = replace(self._config, api_key=credential or None)
            async with AsyncClient(scheduler or addresses[0], config) as client:
                yield client
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Ends all open feeds."""
        self._is_closed.set()

    async def _lines(
        self, first: WatchSchedulerResponse, frames: AsyncIterator[WatchSchedulerResponse]
    ) -> AsyncGenerator[bytes, None]:
        yield self._shared.line(first)
        ending = asyncio.ensure_future(self._is_closed.wait())
        try:
            while not ending.done():
                reading = asyncio.ensure_future(_next(frames))
                try:
                    await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not reading.done():
                        reading.cancel()
                        await asyncio.wait({reading})
                if reading.cancelled() or (frame := reading.result()) is None:
                    return
                yield self._shared.line(frame)
        finally:
            ending.cancel()


async def _next(frames: AsyncIterator[WatchSchedulerResponse]) -> WatchSchedulerResponse | None:
    return await anext(frames, None)
