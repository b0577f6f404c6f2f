"""LiveService: frames, as often as somebody wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from scheduler_service.audit.audit import Audit, NoAudit
from scheduler_service.audit.events import OperatorCalled
from scheduler_service.cluster import Cluster
from scheduler_service.live.live_view import MAX_MOMENTS_PER_SECOND, LiveView
from scheduler_service.service.caller_names import CallerNames
from splitserve.scheduler.v1 import live_pb2, live_pb2_grpc
from splitserve_rpc.domain_error import DomainError

_NS_PER_S = 1_000_000_000
# Sleep may end a little early, which would still be the moment before.
_LATE_NS = 1_000_000


class LiveServicer(live_pb2_grpc.LiveServiceServicer):
    """WatchScheduler."""

    def __init__(
        self,
        cluster: Cluster,
        view: LiveView,
        names: CallerNames,
        audit: Audit | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`view`: the observer of `cluster`, or one of them. `names`: of who calls, for `audit`."""
        self._cluster = cluster
        self._view = view
        self._names = names
        self._audit = audit or NoAudit()
        self._sleep = sleep

    async def WatchScheduler(
        self, request: live_pb2.WatchSchedulerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[live_pb2.WatchSchedulerResponse]:
        """Each frame is of when the one before it is on its way, and the next moment there."""
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("WatchScheduler", context.peer(), name))
        rate = request.frames_per_second
        if not 1 <= rate <= MAX_MOMENTS_PER_SECOND:
            message = f"frames_per_second is {rate}; allowed: 1 to {MAX_MOMENTS_PER_SECOND}"
            raise DomainError("WATCH_RATE_INVALID", message)
        with self._view.watching(self._cluster) as watcher:
            while True:
                yield watcher.frame()
                # All wake up together, so that they share what is made for them; whoever was late,
                # or read late, is not sent more of them afterwards.
                period_ns = _NS_PER_S // rate
                await self._sleep(
                    (period_ns - self._cluster.now_ns() % period_ns + _LATE_NS) / _NS_PER_S
                )
