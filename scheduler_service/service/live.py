"""LiveService: streams frames of the live view to watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from scheduler_service.audit import Audit, NoAudit, OperatorCalled
from scheduler_service.driver import Driver
from scheduler_service.service.caller_checks import CallerNames
from scheduler_service.watching import MAX_SNAPSHOTS_PER_SECOND, LiveView
from splitserve.scheduler.v1 import live_pb2, live_pb2_grpc
from splitserve_contract import DomainError

_NS_PER_S = 1_000_000_000
# Added to each pause: a sleep may end a little early, before the next snapshot has begun.
_LATE_NS = 1_000_000
# A watcher that reads no frame for so long is disconnected, to make room for another watcher.
_UNREAD_S = 30.0


class LiveServicer(live_pb2_grpc.LiveServiceServicer):
    """Implements WatchScheduler."""

    def __init__(
        self,
        cluster: Driver,
        view: LiveView,
        names: CallerNames,
        audit: Audit | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        unread_s: float = _UNREAD_S,
    ) -> None:
        """Keeps the live view, whose snapshots become frames.

        `view`: watcher of `cluster`. `names`: names of callers for the audit log. `unread_s`:
        seconds that a frame may wait for its reader.
        """
        self._cluster = cluster
        self._view = view
        self._names = names
        self._audit = audit or NoAudit()
        self._sleep = sleep
        self._unread_s = unread_s

    async def WatchScheduler(
        self, request: live_pb2.WatchSchedulerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends a frame for each snapshot, once the previous frame is sent.

        Raises DomainError: WATCH_RATE_INVALID, STREAM_NOT_READ.
        """
        name = self._names.of_call(context)
        self._audit.record(OperatorCalled("WatchScheduler", context.peer(), name))
        rate = request.frames_per_second
        if not 1 <= rate <= MAX_SNAPSHOTS_PER_SECOND:
            message = f"frames_per_second is {rate}; allowed: 1 to {MAX_SNAPSHOTS_PER_SECOND}"
            raise DomainError("WATCH_RATE_INVALID", message)
        cluster = self._cluster
        with self._view.watching(cluster.scheduler, cluster.submissions) as watcher:
            # A watcher that reconnects again and again gets no more frames than one that stays.
            early_ns = self._view.pace.next_ns - self._cluster.now_ns()
            if early_ns > 0:
                await self._sleep(early_ns / _NS_PER_S)
            while True:
                await self._send(context, watcher.frame())
                # All watchers wake up together, and so share frames. A late watcher gets no extra
                # frames to catch up.
                period_ns, now_ns = _NS_PER_S // rate, self._cluster.now_ns()
                due_ns = max(now_ns, self._view.pace.next_ns)
                pause_ns = due_ns - now_ns + period_ns - due_ns % period_ns + _LATE_NS
                await self._sleep(pause_ns / _NS_PER_S)

    async def _send(
        self, context: grpc.aio.ServicerContext, frame: live_pb2.WatchSchedulerResponse
    ) -> None:
        """Sends a frame. Raises DomainError(STREAM_NOT_READ) after `unread_s` seconds."""
        try:
            async with asyncio.timeout(self._unread_s):
                await context.write(frame)
        except TimeoutError:
            message = f"a frame was not read for {self._unread_s:g} s; call again to continue"
            raise DomainError("STREAM_NOT_READ", message) from None
