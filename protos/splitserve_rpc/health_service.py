"""The standard health service, which anybody may call: so nothing of what they say is kept."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2

from splitserve_rpc.domain_error import DomainError

# A few for each program that watches; it may as well ask again and again.
MAX_WATCHES = 256
_RETRY_DELAY_S = 1.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """Refuses names that are unknown with a reason.

    The library would say NOT_FOUND without one, and keep every name that is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = {""}
        self._num_watches = 0

    async def set(self, service: str, status: int) -> None:
        self._known.add(service)
        await super().set(service, status)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        self._check_known(request.service)
        return await super().Check(request, context)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self._check_known(request.service)
        if self._num_watches >= MAX_WATCHES:
            message = f"{self._num_watches} Watch calls are open; allowed: {MAX_WATCHES}; use Check"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=_RETRY_DELAY_S)
        self._num_watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches -= 1

    def _check_known(self, service: str) -> None:
        if service not in self._known:
            raise DomainError("SERVICE_UNKNOWN", f"no service {service!r} here")
