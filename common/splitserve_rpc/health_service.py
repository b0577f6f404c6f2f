"""Standard gRPC health service. Everybody may call it, so callers can make it store nothing.

Names of every splitserve server, in addition to those of its services:

- `alive`: SERVING as long as the server answers, whatever its state; for probes that restart.
- `ready`, and the empty name: SERVING while the server does its work; for load balancers.
"""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2

from splitserve_contract import DomainError

# Enough for a few per watching program. Further programs can poll with Check.
MAX_WATCHES = 256
ALIVE = "alive"
READY = "ready"
_SERVER = ""
_RETRY_DELAY_S = 1.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """Health service with `alive` and `ready`. Refuses unknown names with a reason.

    The library answers NOT_FOUND without a reason and keeps every name that is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = {_SERVER, ALIVE, READY}
        self._num_watches = 0

    async def set(self, service: str, status: int) -> None:
        self._known.add(service)
        await super().set(service, status)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        return await super().Check(await self._known_as(request), context)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        request = await self._known_as(request)
        if self._num_watches >= MAX_WATCHES:
            message = f"{self._num_watches} Watch calls are open; allowed: {MAX_WATCHES}; use Check"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=_RETRY_DELAY_S)
        self._num_watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches -= 1

    async def _known_as(
        self, request: health_pb2.HealthCheckRequest
    ) -> health_pb2.HealthCheckRequest:
        """Returns `request` with the name that the library knows.

        Raises DomainError(SERVICE_UNKNOWN).
        """
        service = request.service
        if service not in self._known:
            raise DomainError("SERVICE_UNKNOWN", f"unknown service {service!r}")
        if service == ALIVE:
            await super().set(ALIVE, health_pb2.HealthCheckResponse.SERVING)
        return health_pb2.HealthCheckRequest(service=_SERVER if service == READY else service)
