"""Watch over the streams of one connection: finds dead connections and silent schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from splitserve_rpc.peer_watch import SILENT_AFTER_S, PeerState, PeerWatch, is_answering

# RFC 9113 recommends that servers allow 100 streams. Beyond the limit of a server or proxy, health
# checks wait behind streams, and a missing answer means nothing.
_ALLOWED_STREAMS = 99
_NO_ANSWER = f"the scheduler has not answered for {SILENT_AFTER_S:g} s"

Elsewhere = Callable[[], Awaitable[bool]]


class StreamWatch:
    """Cancels streams whose peer no longer answers; `problem` then holds the reason.

    If only new connections are answered, streams leave this one. If the scheduler does not answer
    at all, streams leave it if another scheduler serves; otherwise they stay and continue if the
    scheduler only paused.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        open_channel: Callable[[], grpc.aio.Channel],
        replace: Callable[[], None],
    ) -> None:
        """Prepares the watch. `open_channel`: opens another connection to the same address.

        `replace`: called so that no new call uses `channel`.
        """
        self.num_responses = 0
        self.problem = ""
        self._channel = channel
        self._open_channel = open_channel
        self._replace = replace
        self._calls: dict[Any, Elsewhere | None] = {}
        # Number of open streams beside which a health check was answered.
        self._most_streams = _ALLOWED_STREAMS
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def stream(
        self,
        call: Any,  # noqa: ANN401
        elsewhere: Elsewhere | None,
    ) -> AsyncGenerator[None, None]:
        """Watches `call` within the context.

        `elsewhere`: tells whether another scheduler serves; None if there is no other.
        """
        self._calls[call] = elsewhere
        if self._watching is None or self._watching.done():
            self.problem = ""
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._calls[call]
            if not self._calls:
                await self.close()

    async def close(self) -> None:
        """Stops the watch."""
        # A stream that begins meanwhile starts a new watch.
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        watch = PeerWatch(self._ask, self._ask_anew, lambda: self.num_responses)
        try:
            while self._calls:
                match await watch.tick():
                    case PeerState.CUT if len(self._calls) <= self._most_streams:
                        self._replace()
                        self._end("the scheduler answers over new connections only")
                        return
                    case PeerState.SILENT if await self._is_better_elsewhere():
                        self._end(_NO_ANSWER)
                        return
        finally:
            await watch.close()

    def _end(self, problem: str) -> None:
        self.problem = problem
        for call in list(self._calls):
            call.cancel()

    async def _is_better_elsewhere(self) -> bool:
        elsewhere = next(iter(self._calls.values()), None)
        return elsewhere is not None and await elsewhere()

    async def _ask(self) -> bool:
        num_streams = len(self._calls)
        if is_answered := await is_answering(self._channel):
            self._most_streams = max(self._most_streams, num_streams)
        return is_answered

    async def _ask_anew(self) -> bool:
        async with self._open_channel() as channel:
            return await is_answering(channel)


def is_cancelled() -> bool:
    """Returns whether the current task itself was cancelled, rather than a call within it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
