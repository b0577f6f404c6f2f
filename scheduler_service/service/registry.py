"""RegistryService: registers executors, lets them leave, and decides which addresses are dialled.

An executor that does not fit is refused at registration, with the field, not at its first step.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from urllib.parse import unquote

import grpc.aio

from scheduler_service.audit import Audit, ExecutorRefused, NoAudit
from scheduler_service.driver import Driver
from scheduler_service.executors import check_address, check_executor_info
from scheduler_service.service.admin import read_timeout_s
from scheduler_service.service.open_calls import PerOwnerLimit
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_common import AddressRules, IpAddress, peer_host, read_ip
from splitserve_contract import CONTRACT_MAJOR, CONTRACT_MINOR, DomainError

# Pending registrations from one host; `executors/applicants` limits those of all hosts.
MAX_PENDING_OF_A_HOST = 4
# Executors of one host that may leave at the same time; each call waits until its executor may go.
MAX_LEAVING_OF_A_HOST = 64
_BUSY_RETRY_S = 1.0


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Implements RegistryService."""

    def __init__(
        self, cluster: Driver, addresses: ExecutorAddresses, audit: Audit | None = None
    ) -> None:
        """`addresses` decides which addresses may be dialled. `audit` None: no audit log."""
        self._cluster = cluster
        self._addresses = addresses
        self._audit = audit or NoAudit()
        self._pending = PerOwnerLimit(MAX_PENDING_OF_A_HOST, _busy)
        self._leaving = PerOwnerLimit(MAX_LEAVING_OF_A_HOST, _too_many_leave)

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterResponse:
        """Takes an executor in once it answers GetInfo, or refuses it and records the refusal."""
        try:
            check_executor_info(request.executor)
            with self._pending.taken(peer_host(context.peer())):
                target = await self._addresses.target(request.executor.address, context.peer())
                await self._cluster.join(request.executor, target)
        except DomainError as error:
            address = request.executor.address
            self._audit.record(ExecutorRefused(address, context.peer(), error.reason))
            raise
        return registry_pb2.RegisterResponse(
            scheduler_epoch=self._cluster.scheduler_epoch,
            contract_version=executor.ContractVersion(major=CONTRACT_MAJOR, minor=CONTRACT_MINOR),
        )

    async def Leave(
        self, request: registry_pb2.LeaveRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.LeaveResponse:
        """Drains an executor at its own wish, and answers when no request is left on it."""
        check_address(request.address)
        timeout_s = read_timeout_s(request.timeout)
        with self._leaving.taken(peer_host(context.peer())):
            await self._cluster.leave(request.address, request.executor_epoch, timeout_s)
        return registry_pb2.LeaveResponse()

    async def FetchAdapter(
        self, request: registry_pb2.FetchAdapterRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.FetchAdapterResponse]:
        """Streams the files of an adapter that requests have."""
        async with aclosing(self._cluster.adapters.chunks(request.digest)) as chunks:
            async for file_name, data in chunks:
                yield registry_pb2.FetchAdapterResponse(file_name=file_name, data=data)


def _busy(host: str) -> DomainError:
    message = f"{MAX_PENDING_OF_A_HOST} registrations from {host} are pending, the maximum"
    return DomainError("REGISTRY_BUSY", message, retry_delay_s=_BUSY_RETRY_S)


def _too_many_leave(host: str) -> DomainError:
    message = f"{MAX_LEAVING_OF_A_HOST} Leave calls from {host} are pending, the maximum"
    return DomainError("REGISTRY_BUSY", message, retry_delay_s=_BUSY_RETRY_S)


# -- Addresses of executors ------------------------------------------------------------------------
#
# An executor may only register addresses that rules allow. Otherwise a process that may register
# could make the scheduler dial any address within its reach.

# An executor waits 5 s for Register, of which asking the executor for its info takes up to 3 s.
_TIMEOUT_S = 1.5
# Threads that an unresponsive name server can block; no other work uses these threads.
_MAX_LOOKUPS = 4

Resolve = Callable[[str], Awaitable[Sequence[str]]]


class Resolver:
    """Resolver of host names, by the system's resolver in threads of its own."""

    def __init__(
        self, look_up: Callable[[str], Sequence[str]] | None = None, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """`look_up` may block: it is called in a thread. `timeout_s`: limit of one lookup."""
        self._look_up = look_up or _look_up
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MAX_LOOKUPS, "resolve-executor")

    async def __call__(self, host: str) -> Sequence[str]:
        """Returns the addresses of `host`. Raises OSError, of which TimeoutError is one."""
        loop = asyncio.get_running_loop()
        looking = loop.run_in_executor(self._threads, self._look_up, host)
        return await asyncio.wait_for(looking, self._timeout_s)


def _look_up(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is too long
        raise OSError(f"{error}") from error
    return [str(target[0]) for *_, target in found]


class ExecutorAddresses:
    """Decides by `rules` which address of an executor is dialled.

    The rules check resolved addresses, and the checked one is dialled: a name may resolve to
    another address later.
    """

    def __init__(self, rules: AddressRules, resolve: Resolve | None = None) -> None:
        self._rules = rules
        self._resolve = resolve or Resolver()

    async def target(self, address: str, peer: str) -> str:
        """Returns `address` (`host:port`) with the host replaced by an allowed IP address.

        `peer`: gRPC peer of the executor that registers. Raises DomainError(EXECUTOR_INFO_INVALID).
        """
        host, _, port = address.rpartition(":")
        asking = _address_of(peer)
        addresses = await self._addresses(address, host.strip("[]"))
        # Of several addresses, the one that the executor registers from comes first.
        for found in sorted(addresses, key=lambda found: found != asking):
            if self._rules.allows(host.strip("[]"), found, asking):
                return f"[{found}]:{port}" if found.version == 6 else f"{found}:{port}"
        origin = "this machine" if asking is None else str(asking)
        raise _refusal(
            address,
            f"not allowed for an executor that registers from {origin}; allowed: {self._rules} "
            "(--executor-addresses)",
        )

    async def _addresses(self, address: str, host: str) -> list[IpAddress]:
        try:
            return [read_ip(host)]
        except ValueError:
            pass
        try:
            return [read_ip(text) for text in await self._resolve(host)]
        except (OSError, ValueError) as error:
            raise _refusal(address, "the host name cannot be resolved") from error


def _address_of(peer: str) -> IpAddress | None:
    """Parses a peer, `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; None for a local socket."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return read_ip(rest.rpartition(":")[0].strip("[]"))


def _refusal(address: str, problem: str) -> DomainError:
    return DomainError("EXECUTOR_INFO_INVALID", f"address is {address!r}: {problem}")
