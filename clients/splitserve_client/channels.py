"""gRPC channel to a scheduler, and the watch over its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve.scheduler.v1 import admin_pb2_grpc, live_pb2_grpc, scheduler_pb2_grpc
from splitserve_client.errors import ServerUnreachable
from splitserve_rpc import SILENT_AFTER_S, PeerState, PeerWatch, is_answering, transport_details

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
        # Largest number of open streams during which a health check was answered.
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


Credentials: TypeAlias = grpc.ChannelCredentials | None

# Timeout of the health check that reports why a connection fails.
_DETAILS_TIMEOUT_S = 1.0


class Stubs:
    """gRPC channel with the service stubs of one scheduler; `streams` watches its open streams."""

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
        """Ends all calls and closes the channel."""
        await self.streams.close()
        await self.channel.close()


class Channels:
    """Holds one current channel; closes a replaced channel when its last call has ended."""

    def __init__(
        self,
        open_channel: Callable[[Credentials], grpc.aio.Channel],
        credentials: Callable[[], Credentials],
        problem: str,
    ) -> None:
        """Opens the first channel.

        `credentials`: returns the credentials for a new channel; the same object until they change.
        `problem`: start of the error message when no connection can be made.
        """
        self._problem = problem
        self._open_channel = open_channel
        self._credentials = credentials
        self._stubs = self._open()
        # Channels replaced while no call ran: closed by the next call.
        self._unused: list[Stubs] = []
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """True if the channel's last known state is connected."""
        return self._stubs.channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def is_used(self) -> bool:
        """Whether a call runs on the current channel."""
        return self._stubs.num_calls > 0

    def renew(self) -> None:
        """Opens a new channel for later calls; running calls stay on the old channel."""
        if self._is_closed:
            return
        if not self._stubs.num_calls:
            self._unused.append(self._stubs)
        self._stubs = self._open()

    def leave(self) -> None:
        """Does nothing: a single address has no other scheduler."""

    @property
    def elsewhere(self) -> None:
        """Always None: a single address has no other scheduler to look for."""
        return None

    @property
    def has_left_one(self) -> bool:
        """Always False: a single address has no other scheduler."""
        return False

    def has(self, stubs: Stubs) -> bool:
        """Returns whether `stubs` belong to the current channel."""
        return stubs is self._stubs

    async def close(self) -> None:
        """Ends all calls and closes all channels."""
        self._is_closed = True
        await self._close_unused()
        await self._stubs.close()

    async def _close_unused(self) -> None:
        while self._unused:
            await self._unused.pop().close()

    @asynccontextmanager
    async def call(self, timeout_s: float) -> AsyncGenerator[Stubs, None]:
        """Yields the stubs for one call, which ends with the context.

        Waits for the first connection. Raises ServerUnreachable (the problem, and gRPC's reason)
        when the connection is refused, after `timeout_s`, or immediately once closed.
        """
        if self._is_closed:
            raise ServerUnreachable("the client is closed")
        if not self.is_ready and self._credentials() is not self._stubs.credentials:
            # A connected channel stays: changed TLS files apply to new connections only.
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
    """Returns why the channel has no connection, or "".

    gRPC tells only calls: makes a health check, which needs no permission.
    """
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        await check(health_pb2.HealthCheckRequest(), timeout=_DETAILS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f" ({transport_details(error)})"
    return ""
