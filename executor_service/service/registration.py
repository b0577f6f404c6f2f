"""Registration of the executor with its scheduler, repeated while no Execute stream is open.

Also holds the client of the RegistryService, the advertised address, and the preference among
several schedulers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_service.service.answer_encoding import encode_info
from executor_service.steps import MAX_CLOCK_SKEW_NS, ExecutorInfo, steady_clock
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_contract import CONTRACT_MAJOR, DomainError
from splitserve_rpc import (
    NOBODY,
    Ask,
    ClusterIdentity,
    Role,
    channel_options,
    duration_from_s,
    failure_of,
    is_answering,
    transport_details,
)

_PERIOD_S = 1.0
_FIRST_RETRY_S = 0.25
# All streams of a restarted scheduler wait for its executors, and a refused connection costs
# little. A scheduler that answers with a refusal is asked less often.
_MAX_RETRY_S = 0.5
_MAX_REFUSED_RETRY_S = 2.0
_MAX_DOUBLINGS = 8
# Failures in a row that are not logged: a scheduler that restarts, or that stops before this
# executor does, is gone for a moment.
_QUIET_FAILURES = 2
_JITTER_RATIO = 0.2
_CALL_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 2.0
_RESOLUTION_TIMEOUT_S = 2.0
# Separate connections: the next attempt does not share the backoff of the last one.
_CHANNEL_OPTIONS = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
# Reasons for which FetchAdapter may succeed later.
_REASON_NOT_FETCHED = MappingProxyType(
    {
        grpc.StatusCode.UNAVAILABLE: "SCHEDULER_UNREACHABLE",
        grpc.StatusCode.NOT_FOUND: "ADAPTER_UNKNOWN",
    }
)
_MAX_SAID = 8
REGISTRY_SERVICE = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
UNREACHABLE = "scheduler_unreachable"
# Values that need no quotes in a log line.
_WORD = re.compile(r"[\w.:/\[\]-]+")
_WILDCARD_HOSTS = ("", "0.0.0.0", "[::]", "::", "*")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Line:
    """Log line, kept to detect changes."""

    event: str
    fields: Mapping[str, object]

    def __str__(self) -> str:
        named = (f"{name}={_shown(value)}" for name, value in self.fields.items())
        return " ".join([self.event, *named])


def _shown(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else repr(text)


class RegistrationFailed(Exception):
    """Error: one registration attempt failed.

    `event`: name of the log event; `fields` are its fields. `reason`: the scheduler's reason if it
    refused, else empty.
    """

    def __init__(self, event: str, fields: Mapping[str, object], reason: str = "") -> None:
        self.line = _Line(event, fields)
        super().__init__(str(self.line))
        self.event = event
        self.reason = reason


class Registry(Protocol):
    """Scheduler side of registration."""

    async def register(self, info: ExecutorInfo) -> int:
        """Registers `info`; returns the epoch of the scheduler. Raises RegistrationFailed."""
        ...


class GrpcRegistry:
    """Client of the RegistryService of the scheduler at one address."""

    def __init__(self, scheduler: str, identity: ClusterIdentity = NOBODY) -> None:
        """`identity`: identity of this executor towards the scheduler."""
        self._scheduler = scheduler
        self._identity = identity

    async def register(self, info: ExecutorInfo) -> int:
        # A new channel reads the certificate files again; registration is rare.
        channel = self._identity.channel(self._scheduler, Role.SCHEDULER, _CHANNEL_OPTIONS)
        async with channel:
            response = await self._register(channel, info)
        major = response.contract_version.major
        if major != CONTRACT_MAJOR:
            raise RegistrationFailed(
                "registration_refused",
                {
                    "reason": "CONTRACT_VERSION_MISMATCH",
                    "message": f"the scheduler at {self._scheduler} speaks contract version"
                    f" {major}, this executor {CONTRACT_MAJOR}",
                },
                "CONTRACT_VERSION_MISMATCH",
            )
        scheduler_epoch: int = response.scheduler_epoch
        return scheduler_epoch

    async def takes_executors(self) -> bool:
        """Returns whether the scheduler answers and is not being stopped."""
        channel = self._identity.channel(self._scheduler, Role.SCHEDULER, _CHANNEL_OPTIONS)
        request = health_pb2.HealthCheckRequest(service=REGISTRY_SERVICE)
        async with channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    request, timeout=_PROBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                # Earlier schedulers do not report the health of single services.
                return failure_of(error).reason == "SERVICE_UNKNOWN"
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @asynccontextmanager
    async def questions(self) -> AsyncGenerator[Ask, None]:
        """Opens a connection for asking repeatedly whether the scheduler answers."""
        channel = self._identity.channel(self._scheduler, Role.SCHEDULER, _CHANNEL_OPTIONS)
        async with channel:
            yield partial(is_answering, channel)

    async def is_answering(self) -> bool:
        """Returns whether the scheduler sends any answer over a new connection."""
        async with self.questions() as ask:
            return await ask()

    async def _register(
        self, channel: grpc.aio.Channel, info: ExecutorInfo
    ) -> registry_pb2.RegisterResponse:
        request = registry_pb2.RegisterRequest(executor=encode_info(info))
        stub, metadata = registry_pb2_grpc.RegistryServiceStub(channel), self._identity.metadata
        try:
            response: registry_pb2.RegisterResponse
            response = await stub.Register(request, timeout=_CALL_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        return response

    async def leave(self, info: ExecutorInfo, timeout_s: float) -> None:
        """Returns when the scheduler has no work left here. Raises RegistrationFailed."""
        request = registry_pb2.LeaveRequest(
            address=info.address,
            executor_epoch=info.executor_epoch,
            timeout=duration_from_s(timeout_s),
        )
        channel = self._identity.channel(self._scheduler, Role.SCHEDULER, _CHANNEL_OPTIONS)
        async with channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            try:
                await stub.Leave(request, metadata=self._identity.metadata)
            except grpc.aio.AioRpcError as error:
                raise self._failed(error) from error

    async def fetch_adapter(self, digest: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yields (file name, next bytes) of an adapter.

        Raises DomainError: SCHEDULER_UNREACHABLE, ADAPTER_UNKNOWN if no request has the adapter any
        more, or else ADAPTER_INVALID.
        """
        channel = self._identity.channel(self._scheduler, Role.SCHEDULER, _CHANNEL_OPTIONS)
        async with channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            request = registry_pb2.FetchAdapterRequest(digest=digest)
            try:
                async for chunk in stub.FetchAdapter(request, metadata=self._identity.metadata):
                    yield chunk.file_name, chunk.data
            except grpc.aio.AioRpcError as error:
                message = f"cannot get its files from the scheduler at {self._scheduler}"
                reason = _REASON_NOT_FETCHED.get(error.code(), "ADAPTER_INVALID")
                raise DomainError(reason, f"{message}: {error.details()}") from error

    def _failed(self, error: grpc.aio.AioRpcError) -> RegistrationFailed:
        failure = failure_of(error)
        if failure.reason:
            return RegistrationFailed(
                "registration_refused",
                {"reason": failure.reason, "message": failure.message},
                failure.reason,
            )
        how = "plain_text" if self._identity.tls is None else "tls"
        return RegistrationFailed(
            UNREACHABLE,
            {
                "scheduler": self._scheduler,
                "over": how,
                "code": failure.code.name,
                "details": transport_details(error),
            },
        )


@dataclass(frozen=True, slots=True)
class Pacing:
    """Waiting and clocks of a Registrar; tests replace them.

    `now_ns`: nanoseconds since 1970, like epochs. `clock`: monotonic seconds.
    """

    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    random: Callable[[], float] = random.random
    now_ns: Callable[[], int] = field(default_factory=steady_clock)
    clock: Callable[[], float] = time.monotonic

    def jittered(self, delay_s: float) -> float:
        """Returns `delay_s`, at random up to a fifth longer or shorter."""
        return delay_s * (1 + _JITTER_RATIO * (2 * self.random() - 1))


class Registrar:
    """Keeps the executor registered. Logs a line when something changes, not per attempt."""

    def __init__(
        self,
        registry: Registry,
        describe: Callable[[], Awaitable[ExecutorInfo]],
        wait_unwatched: Callable[[], Awaitable[None]],
        adopt_scheduler_epoch: Callable[[int], None],
        pacing: Pacing = Pacing(),
    ) -> None:
        """`describe`: returns the info to announce; raises OSError while it is unknown.

        `wait_unwatched`: returns when no Execute stream is open. `adopt_scheduler_epoch`: gets the
        scheduler's epoch after each registration.
        """
        self._registry = registry
        self._describe = describe
        self._wait_unwatched = wait_unwatched
        self._adopt_scheduler_epoch = adopt_scheduler_epoch
        self._pacing = pacing
        self._last_line: _Line | None = None
        self._said_of_transport: set[str] = set()

    async def run(self) -> None:
        """Registers until cancelled."""
        num_failures = 0
        while True:
            await self._wait_unwatched()
            try:
                await self._register()
                delay_s, num_failures = _PERIOD_S, 0
            except RegistrationFailed as failure:
                most_s = _MAX_RETRY_S
                if failure.event != UNREACHABLE:
                    most_s = _MAX_REFUSED_RETRY_S
                    self._log_change(logging.WARNING, failure.line)
                elif num_failures >= _QUIET_FAILURES:
                    self._log_unreachable(failure.line)
                delay_s = min(_FIRST_RETRY_S * 2 ** min(num_failures, _MAX_DOUBLINGS), most_s)
                num_failures += 1
            await self._pacing.sleep(self._pacing.jittered(delay_s))

    async def _register(self) -> None:
        """Registers once. Raises RegistrationFailed."""
        try:
            info = await self._describe()
            scheduler_epoch = await self._registry.register(info)
        except OSError as error:
            raise RegistrationFailed(UNREACHABLE, {"problem": str(error)}) from error
        if scheduler_epoch > self._pacing.now_ns() + MAX_CLOCK_SKEW_NS:
            raise RegistrationFailed(
                "registration_refused",
                {
                    "reason": "FUTURE_SCHEDULER_EPOCH",
                    "message": f"the scheduler_epoch {scheduler_epoch} is more than an hour ahead"
                    " of the executor's clock",
                },
            )
        self._adopt_scheduler_epoch(scheduler_epoch)
        fields = {"address": info.address, "scheduler_epoch": scheduler_epoch}
        self._log_change(logging.INFO, _Line("registered", fields))

    def _log_change(self, level: int, line: _Line) -> None:
        if line != self._last_line:
            self._said_of_transport.clear()
            self._log(level, line)

    def _log_unreachable(self, line: _Line) -> None:
        """Logs each transport error once; its text may alternate between attempts."""
        text = str(line)
        if text in self._said_of_transport or len(self._said_of_transport) >= _MAX_SAID:
            return
        self._said_of_transport.add(text)
        self._log(logging.WARNING, line)

    def _log(self, level: int, line: _Line) -> None:
        self._last_line = line
        _log.log(level, "%s", line, extra={"event": line.event, "fields": line.fields})


async def advertised_address(listen: str, port: int, scheduler: str) -> str:
    """Returns the `host:port` at which the scheduler at `scheduler` reaches the `listen` address.

    For a wildcard the host is the local address from which this machine reaches the scheduler.
    Raises OSError if the scheduler's name cannot be resolved in time.
    """
    host = listen.rpartition(":")[0]
    if host in _WILDCARD_HOSTS:
        host = await _local_host(scheduler)
    return f"{host}:{port}"


async def _local_host(scheduler: str) -> str:
    remote_host, _, remote_port = scheduler.rpartition(":")
    loop = asyncio.get_running_loop()
    # Time limit: a silent name server must not keep the executor from another scheduler.
    async with asyncio.timeout(_RESOLUTION_TIMEOUT_S):
        infos = await loop.getaddrinfo(
            remote_host.strip("[]"), int(remote_port), type=socket.SOCK_DGRAM
        )
    family, kind, protocol, _, remote = infos[0]
    with socket.socket(family, kind, protocol) as datagrams:
        # Connecting a datagram socket sends nothing; it reads the routing table.
        datagrams.connect(remote)
        host: str = datagrams.getsockname()[0]
    return f"[{host}]" if family == socket.AF_INET6 else host


# -- Preference among several schedulers -----------------------------------------------------------


def ranked(schedulers: Collection[str], executor: str) -> list[str]:
    """Returns `schedulers` in the order of `executor`'s preference, by rendezvous hashing.

    Executors compute their order without asking anybody. Adding or removing a scheduler moves only
    the executors that prefer it. Source: Thaler and Ravishankar 1998.
    """
    return sorted(schedulers, key=lambda scheduler: _weight(scheduler, executor), reverse=True)


def _weight(scheduler: str, executor: str) -> bytes:
    return blake2b(f"{scheduler} {executor}".encode(), digest_size=8).digest()


class StabilityDetector:
    """Detects that a value has stayed the same for long enough. A new value starts over."""

    def __init__(self, hold_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """`hold_s`: time to stay the same, asked at each start. `clock`: monotonic seconds."""
        self._hold_s = hold_s
        self._clock = clock
        self._wanted: str | None = None
        self._steady_at_s = 0.0

    def is_steady(self, wanted: str | None) -> bool:
        """Notes `wanted`; returns whether it has been unchanged for `hold_s`. False for None."""
        if wanted is None or wanted != self._wanted:
            self._wanted, self._steady_at_s = wanted, self._clock() + self._hold_s()
        return wanted is not None and self._clock() >= self._steady_at_s
