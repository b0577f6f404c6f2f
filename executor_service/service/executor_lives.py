"""What the executor says of itself: of each of its lives, one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from executor_service.service.departure import Departures
from executor_service.service.execute_streams import ExecuteStreams
from executor_service.service.step_worker import StepWorker
from executor_service.steps.executor_info import ExecutorInfo
from splitserve_rpc.domain_error import DomainError

_log = logging.getLogger(__name__)

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
