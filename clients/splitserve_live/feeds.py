"""Streams of frames for those who look at the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from splitserve.scheduler.v1.live_pb2 import WatchSchedulerResponse
from splitserve_client import AsyncClient, ClientConfig
from splitserve_live.frames import SharedLines
from splitserve_rpc.discovery import Discovery
from splitserve_rpc.domain_error import DomainError

# That are open at a time, of all schedulers; each of these has a bound of its own.
MAX_FEEDS = 16


class Feeds:
    """Asks schedulers as whoever looks: with their credential, and none of its own."""

    def __init__(self, schedulers: Discovery, config: ClientConfig) -> None:
        """`schedulers`: where they listen for operators. `config`: how they are reached."""
        self._schedulers = schedulers
        self._config = replace(config, api_key=None, api_key_file=None, follows_peers=False)
        self._shared = SharedLines(MAX_FEEDS)
        self._num_open = 0
        self._is_closed = asyncio.Event()

    async def addresses(self) -> list[str]:
        """Of the schedulers. Raises OSError."""
        return sorted(await self._schedulers.addresses())

    @asynccontextmanager
    async def open(
        self, scheduler: str, credential: str, frames_per_second: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The frames of one scheduler, a line each; the first is there.

        Raises SplitserveError, OSError, DomainError(TOO_MANY_WATCHERS), and LookupError for a
        scheduler that is none of them.
        """
        async with (
            self._asking(scheduler, credential) as client,
            aclosing(client.watch(frames_per_second)) as frames,
        ):
            yield self._lines(await anext(frames), frames)

    async def life(self, scheduler: str, credential: str, request_id: str) -> dict[str, Any]:
        """What its scheduler wrote down of a request. Raises as `open`."""
        async with self._asking(scheduler, credential) as client:
            return asdict(await client.explain(request_id))

    @asynccontextmanager
    async def _asking(self, scheduler: str, credential: str) -> AsyncIterator[AsyncClient]:
        """A client of one of the schedulers; the first, if it has no name."""
        if self._num_open >= MAX_FEEDS:
            message = f"{self._num_open} look at the page already; allowed: {MAX_FEEDS}"
            raise DomainError("TOO_MANY_WATCHERS", message)
        self._num_open += 1
        try:
            addresses = await self.addresses()
            if scheduler and scheduler not in addresses:
                message = f"there is no scheduler {scheduler!r}; there are: {', '.join(addresses)}"
                raise LookupError(message)
            config = replace(self._config, api_key=credential or None)
            async with AsyncClient(scheduler or addresses[0], config) as client:
                yield client
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Ends all that are open."""
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
