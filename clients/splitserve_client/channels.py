"""The channel to a scheduler: opened anew when it has to connect and the TLS files have changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve.scheduler.v1 import admin_pb2_grpc, live_pb2_grpc, scheduler_pb2_grpc
from splitserve_client.errors import ServerUnreachable
from splitserve_client.stream_watch import StreamWatch
from splitserve_rpc.errors import transport_details

Credentials: TypeAlias = grpc.ChannelCredentials | None

# Of a call that finds no connection, and fails at once.
_DETAILS_TIMEOUT_S = 1.0


class Stubs:
    """A channel, and the services of a scheduler on it; `streams`: those that are open there."""

    def __init__(
        self, channel: grpc.aio.Channel, credentials: Credentials, streams: StreamWatch
    ) -> None:
        self.channel = channel
        self.streams = streams
        self.credentials = credentials
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.live = live_pb2_grpc.LiveServiceStub(channel)
        self.num_calls = 0
        self.has_connected = False

    async def close(self) -> None:
        """Ends what runs."""
        await self.streams.close()
        await self.channel.close()


class Channels:
    """One channel at a time. One that was replaced is closed when its calls have ended."""

    def __init__(
        self,
        open_channel: Callable[[Credentials], grpc.aio.Channel],
        credentials: Callable[[], Credentials],
        problem: str,
    ) -> None:
        """`credentials`: for a channel that is opened now; the same object until they change.

        `problem`: what is said when there is no connection.
        """
        self._problem = problem
        self._open_channel = open_channel
        self._credentials = credentials
        self._stubs = self._open()
        # Those that were replaced while no call ran: closed with the next call.
        self._unused: list[Stubs] = []
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._stubs.channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def is_used(self) -> bool:
        """Whether a call runs."""
        return self._stubs.num_calls > 0

    def renew(self) -> None:
        """Has calls that begin from now on go over a new connection."""
        if self._is_closed:
            return
        if not self._stubs.num_calls:
            self._unused.append(self._stubs)
        self._stubs = self._open()

    def leave(self) -> None:
        """There is no other scheduler."""

    @property
    def elsewhere(self) -> None:
        """There is no other scheduler."""
        return None

    @property
    def has_left_one(self) -> bool:
        """There is no other scheduler."""
        return False

    def has(self, stubs: Stubs) -> bool:
        """Whether these are its stubs."""
        return stubs is self._stubs

    async def close(self) -> None:
        """Ends what runs."""
        self._is_closed = True
        await self._close_unused()
        await self._stubs.close()

    async def _close_unused(self) -> None:
        while self._unused:
            await self._unused.pop().close()

    @asynccontextmanager
    async def call(self, timeout_s: float) -> AsyncGenerator[Stubs, None]:
        """The stubs for one call, which ends with the context.

        Waits for the first connection. Raises ServerUnreachable (the problem, and what gRPC says)
        as soon as it is refused, or after `timeout_s`, or at once after `close`.
        """
        if self._is_closed:
            raise ServerUnreachable("the client is closed")
        if not self.is_ready and self._credentials() is not self._stubs.credentials:
            # What is connected stays: the files are for connections that are made.
            self.renew()
        stubs = self._stubs
        stubs.num_calls += 1
        try:
            await self._close_unused()
            if not stubs.has_connected:
                await _wait_for_connection(stubs.channel, self._problem, timeout_s)
                stubs.has_connected = True
            yield stubs
        finally:
            stubs.num_calls -= 1
            if stubs is not self._stubs and not stubs.num_calls:
                await stubs.close()

    def _open(self) -> Stubs:
        credentials = self._credentials()
        channel = self._open_channel(credentials)
        open_another = partial(self._open_channel, credentials)
        stubs: Stubs

        def replace() -> None:
            if stubs is self._stubs:
                self.renew()

        stubs = Stubs(channel, credentials, StreamWatch(channel, open_another, replace))
        return stubs


async def _wait_for_connection(channel: grpc.aio.Channel, problem: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise ServerUnreachable(problem + await _details(channel))
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise ServerUnreachable(f"{problem}; waited {timeout_s:g} s") from error


async def _details(channel: grpc.aio.Channel) -> str:
    """Why there is no connection. Only a call is told, so one is made that nobody has to allow."""
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        await check(health_pb2.HealthCheckRequest(), timeout=_DETAILS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f" ({transport_details(error)})"
    return ""
