"""The schedulers that a client knows: calls go to one of them, as long as that serves."""

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

# What a scheduler said of itself holds for so long.
_FRESH_S = 1.0
_PROBE_TIMEOUT_S = 2.0

Shuffle = Callable[[list[str]], None]


class Elsewhere(Protocol):
    """See `Target.elsewhere`."""

    async def __call__(self, stubs: Stubs, *, is_silent: bool = False) -> bool:
        """`is_silent`: the scheduler of `stubs` answers nothing: any other is better."""
        ...


class Target(Protocol):
    """Where calls go."""

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection, as far as is known."""

    @property
    def has_left_one(self) -> bool:
        """Whether it left one that stops: where it is now executors may be on their way."""

    async def close(self) -> None:
        """Ends what runs."""

    def call(self, timeout_s: float) -> AbstractAsyncContextManager[Stubs]:
        """The stubs for one call. Raises ServerUnreachable."""

    def renew(self) -> None:
        """Has calls that begin from now on go over a new connection."""

    def leave(self) -> None:
        """Who takes its calls now is being stopped: any other is better."""

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Of the stubs of a call: whether that scheduler does not serve, and another one does.

        None: there is no other.
        """


class Schedulers:
    """Several, of which a client begins with any: so many clients are spread.

    It stays with the one that it has. One that cannot be reached, has no executor or is being
    stopped is left for another that serves; without another, it is the one that is asked even so.
    """

    def __init__(
        self,
        discovery: Discovery,
        open_channels: Callable[[str], Channels],
        clock: Callable[[], float],
        shuffle: Shuffle = random.shuffle,
        stopping: str | None = None,
    ) -> None:
        """`stopping`: one that said that it stops.

        Any other is better, though it may have no executor yet.
        """
        self._discovery = discovery
        self._open_channels = open_channels
        self._clock = clock
        self._shuffle = shuffle
        self._channels: dict[str, Channels] = {}
        # It is one of `_channels`.
        self._current: str | None = None
        self._fresh_until_s = 0.0
        self._stopping = stopping
        # One that does not answer: it is asked last.
        self._silent: str | None = None
        # Of all calls that wait for it.
        self._search: asyncio.Task[Channels] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection to the one that it has."""
        return self._current is not None and self._channels[self._current].is_ready

    @property
    def has_left_one(self) -> bool:
        """See Target."""
        return self._stopping is not None

    async def close(self) -> None:
        """Ends what runs."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        for channels in list(self._channels.values()):
            await channels.close()

    @asynccontextmanager
    async def call(self, timeout_s: float) -> AsyncGenerator[Stubs, None]:
        """The stubs for one call. Raises ServerUnreachable if none of them can be reached."""
        channels = await self._choose(timeout_s)
        address = self._current
        try:
            async with channels.call(timeout_s) as stubs:
                yield stubs
        except BaseException as error:
            # Whatever it was, it is looked at again before the next call.
            self._fresh_until_s = 0.0
            if isinstance(error, SplitserveError) and error.reason == "DRAINING":
                self._stopping = address
            raise

    def renew(self) -> None:
        """See Target."""
        if self._current is not None:
            self._channels[self._current].renew()

    def leave(self) -> None:
        """See Target."""
        self._fresh_until_s, self._stopping = 0.0, self._current

    @property
    def elsewhere(self) -> Elsewhere:
        """See Target."""
        return self._serves_elsewhere

    async def _serves_elsewhere(self, stubs: Stubs, *, is_silent: bool = False) -> bool:
        self._fresh_until_s = 0.0
        current = None if self._current is None else self._channels[self._current]
        if is_silent and current is not None and current.has(stubs):
            self._silent = self._current
            # Who looks now waits for an answer of that one.
            self._search = None
        try:
            current = await self._choose(_PROBE_TIMEOUT_S)
        except SplitserveError:
            return False  # nobody is better; whether its own is lost, the stream says itself
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
            # Perhaps nobody waits any more when it fails.
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
        """The one that it has, if that serves, or another. Raises SplitserveError."""
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
        """What runs there goes on."""
        gone = [
            address
            for address, channels in self._channels.items()
            if address not in addresses and address != self._current and not channels.is_used
        ]
        # All at once: who awaits lets others look at them.
        for channels in [self._channels.pop(address) for address in gone]:
            await channels.close()

    async def _is_serving(self, address: str, timeout_s: float) -> bool:
        """Raises ServerUnreachable and CredentialsUnusable."""
        if address not in self._channels:
            self._channels[address] = self._open_channels(address)
        async with self._channels[address].call(timeout_s) as stubs:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = await stubs.health.Check(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise ServerUnreachable(f"{address} does not answer: {error.details()}") from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
