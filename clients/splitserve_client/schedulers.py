"""Choice of the scheduler that gets a client's calls, if the client knows several."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health_pb2

from splitserve_client.channels import Channels, Stubs
from splitserve_client.errors import ServerUnreachable, SplitserveError
from splitserve_client.probes import Answers, ask
from splitserve_rpc.discovery import Discovery

# Validity of a scheduler's last health status.
_FRESH_S = 1.0
_PROBE_TIMEOUT_S = 2.0

Shuffle = Callable[[list[str]], None]


class Elsewhere(Protocol):
    """Type of `Target.elsewhere`."""

    async def __call__(self, stubs: Stubs, *, is_silent: bool = False) -> bool:
        """Looks for a better scheduler.

        `is_silent`: the scheduler of `stubs` does not answer at all, so that any other is better.
        """
        ...


class Target(Protocol):
    """Destination of calls: one scheduler, or one of several."""

    @property
    def is_ready(self) -> bool:
        """True if the target's last known state is connected."""

    @property
    def has_left_one(self) -> bool:
        """Whether the target left a stopping scheduler.

        Executors may still be moving to the new one.
        """

    async def close(self) -> None:
        """Ends all calls."""

    def call(self, timeout_s: float) -> AbstractAsyncContextManager[Stubs]:
        """Yields the stubs for one call. Raises ServerUnreachable."""

    def renew(self) -> None:
        """Opens a new connection for later calls."""

    def leave(self) -> None:
        """Notes that the current scheduler is stopping, so that any other is better."""

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Search function for a better scheduler; None without alternative schedulers.

        Takes the stubs of a call; returns whether their scheduler does not serve and another does.
        """


class Schedulers:
    """Target with several schedulers, of which each client picks one at random to spread the load.

    The client stays with its scheduler. It leaves one that is unreachable, has no executor or is
    stopping if another one serves; otherwise calls still go to the current scheduler.
    """

    def __init__(
        self,
        discovery: Discovery,
        open_channels: Callable[[str], Channels],
        clock: Callable[[], float],
        shuffle: Shuffle = random.shuffle,
        stopping: str | None = None,
    ) -> None:
        """Prepares the target. `stopping`: a scheduler that reported that it stops.

        Any other scheduler is preferred, even if it has no executor yet.
        """
        self._discovery = discovery
        self._open_channels = open_channels
        self._clock = clock
        self._shuffle = shuffle
        self._channels: dict[str, Channels] = {}
        # Key of `_channels`.
        self._current: str | None = None
        self._fresh_until_s = 0.0
        self._stopping = stopping
        # Scheduler that does not answer: probed last.
        self._silent: str | None = None
        # Shared by all calls that wait for it.
        self._search: asyncio.Task[Channels] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the current scheduler is connected."""
        return self._current is not None and self._channels[self._current].is_ready

    @property
    def has_left_one(self) -> bool:
        """See Target."""
        return self._stopping is not None

    async def close(self) -> None:
        """Ends all calls."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        for channels in list(self._channels.values()):
            await channels.close()

    @asynccontextmanager
    async def call(self, timeout_s: float) -> AsyncGenerator[Stubs, None]:
        """Yields the stubs for one call.

        Raises ServerUnreachable if no scheduler can be reached.
        """
        channels = await self._choose(timeout_s)
        address = self._current
        try:
            async with channels.call(timeout_s) as stubs:
                yield stubs
        except BaseException as error:
            # After any error the health status is checked before the next call.
            self._fresh_until_s = 0.0
            if isinstance(error, SplitserveError) and error.reason == "DRAINING":
                self._stopping = address
            raise

    def renew(self) -> None:
        """Opens a new connection to the current scheduler for later calls."""
        if self._current is not None:
            self._channels[self._current].renew()

    def leave(self) -> None:
        """Notes that the current scheduler is stopping."""
        self._fresh_until_s, self._stopping = 0.0, self._current

    @property
    def elsewhere(self) -> Elsewhere:
        """Function that looks for another serving scheduler; see Target."""
        return self._serves_elsewhere

    async def _serves_elsewhere(self, stubs: Stubs, *, is_silent: bool = False) -> bool:
        self._fresh_until_s = 0.0
        current = None if self._current is None else self._channels[self._current]
        if is_silent and current is not None and current.has(stubs):
            self._silent = self._current
            # The running search waits for an answer of the silent scheduler.
            self._search = None
        try:
            current = await self._choose(_PROBE_TIMEOUT_S)
        except SplitserveError:
            return False  # no better scheduler; the stream itself reports whether it is lost
        return self._fresh_until_s > 0.0 and not current.has(stubs)

    async def _choose(self, timeout_s: float) -> Channels:
        try:
            addresses = await self._discovery.addresses()
        except OSError as error:
            raise ServerUnreachable(f"the schedulers are not known: {error}") from error
        if self._current in addresses and self._clock() < self._fresh_until_s:
            return self._channels[self._current]
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._find(addresses, timeout_s))
            # Retrieves the exception, as all waiting calls may be gone when the search fails.
            self._search.add_done_callback(lambda done: done.cancelled() or done.exception())
        search = self._search
        try:
            return await asyncio.shield(search)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if search.cancelled() and task is not None and not task.cancelling():
                raise ServerUnreachable("the client was closed") from None
            raise

    async def _find(self, addresses: tuple[str, ...], timeout_s: float) -> Channels:
        """Returns the channels of the current scheduler if it serves, or of another.

        Probes the current scheduler, then the others in random order, then stopping and silent
        ones. Raises SplitserveError.
        """
        await self._forget_others(addresses)
        probe = partial(self._is_serving, timeout_s=min(timeout_s, _PROBE_TIMEOUT_S))
        answers = Answers()
        last = [each for each in addresses if each in (self._stopping, self._silent)]
        mine = [each for each in addresses if each == self._current and each not in last]
        others = [each for each in addresses if each not in (*mine, *last)]
        self._shuffle(others)
        for each in (mine, others, last):
            if answers.serving is None:
                await ask(each, probe, answers)
        found = answers.serving or answers.idle
        if found is None:
            raise answers.problem or ServerUnreachable("no scheduler is known")
        if answers.serving is not None:
            self._fresh_until_s = self._clock() + _FRESH_S
            if found == self._stopping:
                self._stopping = None
            if found == self._silent:
                self._silent = None
        self._current = found
        return self._channels[found]

    async def _forget_others(self, addresses: tuple[str, ...]) -> None:
        """Closes the unused channels of schedulers that are no longer listed.

        Running calls continue.
        """
        gone = [
            address
            for address, channels in self._channels.items()
            if address not in addresses and address != self._current and not channels.is_used
        ]
        # Removes all before the first `await`, during which other tasks see `_channels`.
        for channels in [self._channels.pop(address) for address in gone]:
            await channels.close()

    async def _is_serving(self, address: str, timeout_s: float) -> bool:
        """Returns the health status of a scheduler.

        Raises ServerUnreachable and CredentialsUnusable.
        """
        if address not in self._channels:
            self._channels[address] = self._open_channels(address)
        async with self._channels[address].call(timeout_s) as stubs:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = await stubs.health.Check(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise ServerUnreachable(f"{address} does not answer: {error.details()}") from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
