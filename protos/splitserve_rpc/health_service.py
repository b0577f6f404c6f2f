"""The standard health service, which anybody may call: so nothing of what they say is kept.

Names that every server of ours has, beside those of its services:

- `alive`: SERVING as long as the server answers, whatever it can do; for probes that restart.
- `ready`, and the empty name: SERVING while the server does its work; for balancers.
"""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2

from splitserve_rpc.domain_error import DomainError

# A few for each program that watches; it may as well ask again and again.
MAX_WATCHES = 256
ALIVE = "alive"
READY = "ready"
_SERVER = ""
_RETRY_DELAY_S = 1.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """Knows `alive` and `ready`, and refuses names that are unknown with a reason.

    The library would say NOT_FOUND without one, and keep every name that is watched.
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
        """Returns `request` by the name that the library knows. Raises DomainError."""
        service = request.service
        if service not in self._known:
            raise DomainError("SERVICE_UNKNOWN", f"no service {service!r} here")
        if service == ALIVE:
            await super().set(ALIVE, health_pb2.HealthCheckResponse.SERVING)
        return health_pb2.HealthCheckRequest(service=_SERVER if service == READY else service)
