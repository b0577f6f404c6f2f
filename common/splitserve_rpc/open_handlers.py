"""Tracker of the handlers of a server that have not ended: `OpenHandlers`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio


class OpenHandlers(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Tracks the tasks that handle calls, from the start of a call to the end of its task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        task = asyncio.current_task()
        assert task is not None, "the library calls from the handler's task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def wait_ended(self, timeout_s: float) -> bool:
        """Waits until no handler is open. Returns whether that happened within `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks
