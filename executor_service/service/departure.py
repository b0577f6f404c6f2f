"""How an executor goes: its scheduler is told, and takes away what is its own."""

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
from executor_service.steps.executor_info import ExecutorInfo
from splitserve_rpc.domain_error import DomainError

# Of our time, what the scheduler may give to what runs here; the rest is for what moves then.
_SHARE_OF_REQUESTS = 0.9
_RETRY_S = 0.25
# Without a stream there is nothing of the scheduler's here, but for what it is about to begin.
_LAST_WORD_S = 0.5

_PACING = Pacing()

_log = logging.getLogger(__name__)


class Farewells(Protocol):
    """Where executors say that they go."""

    async def leave(self, info: ExecutorInfo, timeout_s: float) -> None:
        """Returns when nothing of the scheduler's is here. Raises RegistrationFailed."""
        ...


class Leaver(Protocol):
    """What an executor shows of itself while it leaves: an ExecutorServicer."""

    is_leaving: bool
    streams: ExecuteStreams


class Departures:
    """How an executor leaves schedulers, to end or to go to another."""

    def __init__(self, door: Callable[[str], Farewells], leaver: Leaver, timeout_s: float) -> None:
        """`door`: to the scheduler at an address. `timeout_s`: that leaving may take."""
        self._door = door
        self._leaver = leaver
        self._timeout_s = timeout_s

    async def leave(self, scheduler: str, info: ExecutorInfo) -> None:
        """Returns when `info`, a life that `scheduler` may know, may end."""
        leaver = self._leaver
        leaver.is_leaving = True
        try:
            wait_unwatched = leaver.streams.wait_none_open
            await depart(self._door(scheduler), info, wait_unwatched, self._timeout_s)
        finally:
            leaver.is_leaving = False


async def depart(
    registry: Farewells,
    info: ExecutorInfo,
    wait_unwatched: Callable[[], Awaitable[None]],
    timeout_s: float,
    pacing: Pacing = _PACING,
) -> None:
    """Returns when the executor may go; after `timeout_s` it may in any case.

    `wait_unwatched`: returns when no Execute stream is open.
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


async def _leave(registry: Farewells, info: ExecutorInfo, timeout_s: float, pacing: Pacing) -> None:
    """Says it until it is heard, by a scheduler that restarts, too."""
    while True:
        try:
            await registry.leave(info, _SHARE_OF_REQUESTS * timeout_s)
            return
        except RegistrationFailed as failure:
            _log.info("leave_failed problem=%r", str(failure))
        await pacing.sleep(pacing.jittered(_RETRY_S))


# -- What the executor says of itself: of each of its lives, one after the other -------------------


# Of a scheduler: under which `host:port` it reaches us. Raises OSError.
AddressFor = Callable[[str], Awaitable[str]]


class ExecutorLives:
    """`info`: the present life, by the address that was announced last.

    `is_drained`: whether a scheduler sent the process away, and none has taken it since.
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
        """The present life, as `scheduler` reaches it. Raises OSError while its name is unknown."""
        self.info = replace(self.info, address=await self._address_for(scheduler))
        return self.info

    async def leave(self, scheduler: str) -> None:
        """Has `scheduler` let what runs end, or move it; returns when the present life may end."""
        await self._departures.leave(scheduler, self.info)

    def begin_anew(self) -> None:
        """Begins another life, with a newer epoch, and ends the streams of the last one."""
        # A clock may have been set back.
        executor_epoch = max(self._now_ns(), self.info.executor_epoch + 1)
        _log.info("executor_life_begun executor_epoch=%d", executor_epoch)
        self.info = replace(self.info, executor_epoch=executor_epoch)
        self._worker.begin_life(executor_epoch)
        gone = DomainError("DRAINING", "the executor has gone to another scheduler")
        self._streams.fail_all(gone)
