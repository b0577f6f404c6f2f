"""Registration of executors: what does not fit is refused here, by name, not at the first step."""

from __future__ import annotations

import grpc.aio

from scheduler_service.audit.audit import Audit, NoAudit
from scheduler_service.audit.events import ExecutorRefused
from scheduler_service.driver import Driver
from scheduler_service.executors.handshake import check_address, check_executor_info
from scheduler_service.service.drain_timeout import read_timeout_s
from scheduler_service.service.executor_addresses import ExecutorAddresses
from scheduler_service.service.places import Places
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import registry_pb2, registry_pb2_grpc
from splitserve_rpc.addresses import peer_host
from splitserve_rpc.contract import CONTRACT_MAJOR, CONTRACT_MINOR
from splitserve_rpc.domain_error import DomainError

# Of one machine, among all that may wait at a time (`executors/engines`).
MAX_PENDING_OF_A_HOST = 4
# As many executors of a machine leave at a time; each waits until it may go.
MAX_LEAVING_OF_A_HOST = 64
_BUSY_RETRY_S = 1.0


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Register, Leave."""

    def __init__(
        self, cluster: Driver, addresses: ExecutorAddresses, audit: Audit | None = None
    ) -> None:
        """`audit`: None to tell nobody."""
        self._cluster = cluster
        self._addresses = addresses
        self._audit = audit or NoAudit()
        self._pending = Places(MAX_PENDING_OF_A_HOST, _busy)
        self._leaving = Places(MAX_LEAVING_OF_A_HOST, _too_many_leave)

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterResponse:
        """Takes an executor into the cluster once it answers, or refuses it."""
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
        """Answers when nothing of the cluster's is at that executor any more."""
        check_address(request.address)
        timeout_s = read_timeout_s(request.timeout)
        with self._leaving.taken(peer_host(context.peer())):
            await self._cluster.leave(request.address, request.executor_epoch, timeout_s)
        return registry_pb2.LeaveResponse()


def _busy(host: str) -> DomainError:
    message = f"{MAX_PENDING_OF_A_HOST} registrations from {host} wait, as many as may"
    return DomainError("REGISTRY_BUSY", message, retry_delay_s=_BUSY_RETRY_S)


def _too_many_leave(host: str) -> DomainError:
    message = f"{MAX_LEAVING_OF_A_HOST} executors of {host} wait until they may go"
    return DomainError("REGISTRY_BUSY", message, retry_delay_s=_BUSY_RETRY_S)
