"""The schedulers that a client knows: calls go to one of them, as long as that serves."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health_pb2

from splitserve_client.channels import Channels, Stubs
from splitserve_client.errors import ServerUnreachable
from splitserve_rpc.discovery import Discovery

# What a scheduler said of itself holds for so long.
_FRESH_S = 1.0
_PROBE_TIMEOUT_S = 2.0

Shuffle = Callable[[list[str]], None]
Elsewhere = Callable[[Stubs], Awaitable[bool]]


class Target(Protocol):
    """Where calls go."""

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection, as far as is known."""

    async def close(self) -> None:
        """Ends what runs."""

    def call(self, timeout_s: float) -> AbstractAsyncContextManager[Stubs]:
        """The stubs for one call. Raises ServerUnreachable."""

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
    ) -> None:
        self._discovery = discovery
        self._open_channels = open_channels
        self._clock = clock
        self._shuffle = shuffle
        self._channels: dict[str, Channels] = {}
        self._current: str | None = None
        self._fresh_until_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection to the one that it has."""
        return self._current is not None and self._channels[self._current].is_ready

    async def close(self) -> None:
        """Ends what runs."""
        for channels in self._channels.values():
            await channels.close()

    @asynccontextmanager
    async def call(self, timeout_s: float) -> AsyncGenerator[Stubs, None]:
        """The stubs for one call. Raises ServerUnreachable if none of them can be reached."""
        current = await self._choose(timeout_s)
        try:
            async with self._channels[current].call(timeout_s) as stubs:
                yield stubs
        except BaseException:
            # Whatever it was, it is looked at again before the next call.
            self._fresh_until_s = 0.0
            raise

    @property
    def elsewhere(self) -> Elsewhere:
        """See Target."""
        return self._serves_elsewhere

    async def _serves_elsewhere(self, stubs: Stubs) -> bool:
        self._fresh_until_s = 0.0
        current = await self._choose(_PROBE_TIMEOUT_S)
        return self._fresh_until_s > 0.0 and not self._channels[current].has(stubs)

    async def _choose(self, timeout_s: float) -> str:
        addresses = await self._known()
        if self._current in addresses and self._clock() < self._fresh_until_s:
            return self._current
        problem = ServerUnreachable("no scheduler is known")
        fallback: str | None = None
        for address in self._order(addresses):
            try:
                if await self._is_serving(address, min(timeout_s, _PROBE_TIMEOUT_S)):
                    self._current = address
                    self._fresh_until_s = self._clock() + _FRESH_S
                    return address
                fallback = fallback or address
            except ServerUnreachable as error:
                problem = error
        if fallback is None:
            raise problem
        self._current = fallback
        return fallback

    def _order(self, addresses: tuple[str, ...]) -> list[str]:
        """The one that it has, then the others in any order."""
        order = list(addresses)
        self._shuffle(order)
        return sorted(order, key=lambda address: address != self._current)

    async def _known(self) -> tuple[str, ...]:
        """The addresses, each with its channels. Raises ServerUnreachable."""
        try:
            addresses = await self._discovery.addresses()
        except OSError as error:
            raise ServerUnreachable(f"the schedulers are not known: {error}") from error
        for address in addresses:
            if address not in self._channels:
                self._channels[address] = self._open_channels(address)
        for address in [known for known in self._channels if known not in addresses]:
            # What runs there goes on; channels close themselves after their last call.
            if address != self._current and not self._channels[address].is_used:
                await self._channels.pop(address).close()
        return addresses

    async def _is_serving(self, address: str, timeout_s: float) -> bool:
        """Raises ServerUnreachable."""
        async with self._channels[address].call(timeout_s) as stubs:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = await stubs.health.Check(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise ServerUnreachable(f"{address} does not answer: {error.details()}") from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
