"""Schedulers that a client knows: channels to them, and the choice of the one that is called."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health_pb2

from splitserve_client.channels import Channels, Credentials, Stubs
from splitserve_client.client_config import ClientConfig
from splitserve_client.errors import ServerUnreachable
from splitserve_common import (
    MAX_PORT,
    Discovery,
    FilesUnusable,
    discovery,
    is_loopback,
    names_several,
)
from splitserve_rpc import channel_options
from splitserve_text import SplitserveError

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def warn_of_plain_text(address: str) -> None:
    """Logs a warning, once per server of another machine.

    Sending is not refused: only the operator of the client knows whether the connection is
    protected by other means, such as a tunnel. Without log handlers Python writes the line to
    stderr.
    """
    if not is_loopback(address):
        _log.warning(
            "credential_in_plain_text address=%s: others on the network can read it; use TLS",
            address,
        )


# Number of unanswered probes that run at the same time.
MAX_AT_ONCE = 8
# Delay before the next probe if no answer arrives. Usually the first scheduler answers. If clients
# probed all schedulers at once, all clients would choose the fastest and not be spread.
_PACE_S = 0.25

IsServing = Callable[[str], Awaitable[bool]]


@dataclass(slots=True)
class Answers:
    """Answers of the probed schedulers.

    `serving`: one that serves; `idle`: the first that does not.
    """

    serving: str | None = None
    idle: str | None = None
    problem: SplitserveError | None = None


async def ask(addresses: Iterable[str], is_serving: IsServing, answers: Answers) -> None:
    """Probes schedulers and adds to `answers` until one serves or all have answered.

    `is_serving` raises SplitserveError for an unreachable scheduler, and takes bounded time.
    """
    left = deque(addresses)
    probes: dict[asyncio.Future[bool], str] = {}
    try:
        while answers.serving is None and (left or probes):
            if left and len(probes) < MAX_AT_ONCE:
                address = left.popleft()
                probes[asyncio.ensure_future(is_serving(address))] = address
            may_ask = bool(left) and len(probes) < MAX_AT_ONCE
            await asyncio.wait(
                probes,
                timeout=_PACE_S if may_ask else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for probe in [probe for probe in probes if probe.done()]:
                _note(probes.pop(probe), probe, answers)
    finally:
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


def _note(address: str, probe: asyncio.Future[bool], answers: Answers) -> None:
    try:
        if not probe.result():
            answers.idle = answers.idle or address
        elif answers.serving is None:
            answers.serving = address
    except SplitserveError as error:
        answers.problem = error


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
            raise ServerUnreachable(
                f"the addresses of the schedulers are unknown: {error}"
            ) from error
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


_MAX_PORT_DIGITS = 20


def open_target(address: str, config: ClientConfig) -> Target:
    """Returns the target for `address`. Raises CredentialsUnusable and ServerUnreachable."""
    port = address.rpartition(":")[2]
    # gRPC would use the port modulo 65536.
    if port.isdecimal() and (len(port) > _MAX_PORT_DIGITS or int(port) > MAX_PORT):
        problem = f"its port is above {MAX_PORT}"
        raise ServerUnreachable(f"the address {address[:100]!r} cannot be used: {problem}")
    if not names_several(address):
        return open_channels(config, address)
    try:
        found = discovery(address)
    except (ValueError, FilesUnusable) as error:
        raise ServerUnreachable(f"the address {address!r} cannot be used: {error}") from error
    config.open_credentials()  # reports unusable credentials now
    config = replace(config, tls_name=found.host or config.tls_name)
    return Schedulers(found, partial(open_channels, config), config.timing.clock)


def open_channels(config: ClientConfig, address: str) -> Channels:
    """Opens the channel to one address. Raises CredentialsUnusable."""
    if config.has_api_key and config.is_plain_text:
        warn_of_plain_text(address)
    open_channel = partial(_open_channel, address, config)
    return Channels(open_channel, config.open_credentials(), _unreachable(address, config))


def _open_channel(address: str, config: ClientConfig, credentials: Credentials) -> grpc.aio.Channel:
    """Opens a channel that reconnects soon after the server is back."""
    options: list[tuple[str, int | str]] = [
        *channel_options(),
        # gRPC's default backoff grows to minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", int(config.connect_timeout_s * 1000)),
        ("grpc.dns_min_time_between_resolutions_ms", 500),
        ("grpc.enable_http_proxy", 0),
        # Otherwise a replacement channel would share the abandoned connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if credentials is not None:
        if config.tls_name is not None:
            options.append(("grpc.ssl_target_name_override", config.tls_name))
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


def _unreachable(address: str, config: ClientConfig) -> str:
    """Returns the start of the message for a failed connection; gRPC's reason follows."""
    if config.is_plain_text:
        return f"cannot connect to {address} in plain text: no server answers, or it requires TLS"
    problem = "no server answers, or it requires plain text or another certificate"
    return f"cannot connect to {address} with TLS: {problem}"
