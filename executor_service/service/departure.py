"""Departure of an executor from its scheduler, and its lives, one for each membership.

When an executor leaves, the scheduler is told first, so that it can finish or move its requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from executor_service.service.registration import Pacing, RegistrationFailed
from executor_service.service.servicer import ExecuteStreams
from executor_service.service.step_worker import StepWorker
from executor_service.steps import ExecutorInfo
from splitserve_contract import DomainError

# Share of the timeout that the scheduler may give to running requests; the rest is for moving them.
_SHARE_OF_REQUESTS = 0.9
_RETRY_S = 0.25
# Wait after the last stream has closed: the scheduler may be about to begin a step.
_LAST_WORD_S = 0.5

_PACING = Pacing()

_log = logging.getLogger(__name__)


class DepartureNotices(Protocol):
    """Scheduler side of a departure."""

    async def leave(self, info: ExecutorInfo, timeout_s: float) -> None:
        """Returns when the scheduler has no work left here. Raises RegistrationFailed."""
        ...


class DepartingExecutor(Protocol):
    """State of an executor that a departure needs: an ExecutorServicer."""

    is_leaving: bool
    streams: ExecuteStreams


class Departures:
    """Leaves schedulers, before the process ends or joins another scheduler."""

    def __init__(
        self, door: Callable[[str], DepartureNotices], leaver: DepartingExecutor, timeout_s: float
    ) -> None:
        """`door`: connects to the scheduler at an address. `timeout_s`: limit of one departure."""
        self._door = door
        self._leaver = leaver
        self._timeout_s = timeout_s

    async def leave(self, scheduler: str, info: ExecutorInfo) -> None:
        """Leaves `scheduler`; returns when the life `info`, which it may know, may end."""
        leaver = self._leaver
        leaver.is_leaving = True
        try:
            wait_unwatched = leaver.streams.wait_none_open
            await depart(self._door(scheduler), info, wait_unwatched, self._timeout_s)
        finally:
            leaver.is_leaving = False


async def depart(
    registry: DepartureNotices,
    info: ExecutorInfo,
    wait_unwatched: Callable[[], Awaitable[None]],
    timeout_s: float,
    pacing: Pacing = _PACING,
) -> None:
    """Tells the scheduler that the executor leaves; returns when the executor may go.

    That is when the scheduler has answered, or shortly after the last Execute stream has closed, or
    after `timeout_s`. `wait_unwatched`: returns when no Execute stream is open.
    """

    async def unwatched() -> None:
        await wait_unwatched()
        await pacing.sleep(_LAST_WORD_S)

    leaving = asyncio.ensure_future(_leave(registry, info, timeout_s, pacing))
    either = {leaving, asyncio.ensure_future(unwatched())}
    try:
        done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in either:
            task.cancel()
        await asyncio.gather(*either, return_exceptions=True)
    for task in done:
        task.result()
    if not done:
        _log.warning("executor_not_drained timeout_s=%g", timeout_s)


async def _leave(
    registry: DepartureNotices, info: ExecutorInfo, timeout_s: float, pacing: Pacing
) -> None:
    """Calls `leave` until it succeeds, so that a scheduler that restarts is told, too."""
    while True:
        try:
            await registry.leave(info, _SHARE_OF_REQUESTS * timeout_s)
            return
        except RegistrationFailed as failure:
            _log.info("leave_failed problem=%r", str(failure))
        await pacing.sleep(pacing.jittered(_RETRY_S))


# -- Lives of an executor, one after the other -----------------------------------------------------


# Returns the `host:port` at which a scheduler reaches this executor. Raises OSError.
AddressFor = Callable[[str], Awaitable[str]]


class ExecutorLives:
    """Current life of the executor and the start of the next one.

    `info`: the current life, with the address announced last. `is_drained`: whether a scheduler
    drained this executor and none has accepted it since.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        address_for: AddressFor,
        departures: Departures,
        worker: StepWorker,
        streams: ExecuteStreams,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.info = info
        self.is_drained = False
        self._address_for = address_for
        self._departures = departures
        self._worker = worker
        self._streams = streams
        self._now_ns = now_ns

    async def describe(self, scheduler: str) -> ExecutorInfo:
        """Returns the current life with the address for `scheduler`. Raises OSError without one."""
        self.info = replace(self.info, address=await self._address_for(scheduler))
        return self.info

    async def leave(self, scheduler: str) -> None:
        """Lets `scheduler` finish or move its requests; returns when the current life may end."""
        await self._departures.leave(scheduler, self.info)

    def begin_anew(self) -> None:
        """Begins another life, with a newer epoch, and ends the streams of the last one."""
        # The wall clock may have been set back.
        executor_epoch = max(self._now_ns(), self.info.executor_epoch + 1)
        _log.info("executor_life_begun executor_epoch=%d", executor_epoch)
        self.info = replace(self.info, executor_epoch=executor_epoch)
        self._worker.begin_life(executor_epoch)
        gone = DomainError("DRAINING", "the executor moved to another scheduler")
        self._streams.fail_all(gone)
