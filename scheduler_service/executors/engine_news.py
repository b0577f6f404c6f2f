"""What the log and the audit log are told of executors that come and go."""

from __future__ import annotations

import logging

from scheduler_service.audit.audit import Audit
from scheduler_service.audit.events import (
    ExecutorDrained,
    ExecutorLost,
    ExecutorRegistered,
    ExecutorWithdrawn,
)
from splitserve.executor.v1 import executor_pb2 as executor

_log = logging.getLogger(__name__)


class EngineNews:
    """Tells both."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def joined(self, info: executor.ExecutorInfo) -> None:
        """It serves from now on."""
        _log.info("executor_joined address=%s epoch=%d", info.address, info.executor_epoch)
        self._audit.record(ExecutorRegistered(info.address, info.executor_epoch, info.model.name))

    def drained(self, info: executor.ExecutorInfo) -> None:
        """It has left."""
        _log.info("executor_drained address=%s", info.address)
        self._audit.record(ExecutorDrained(info.address, info.executor_epoch))

    def withdrawn(self, info: executor.ExecutorInfo, num_requests: int, why: str) -> None:
        """Reports that an executor is withdrawn, as its steps or rows fail; its requests move."""
        _log.error(
            "executor_withdrawn address=%s num_requests=%d reason=%r",
            info.address,
            num_requests,
            why,
        )
        self._audit.record(ExecutorWithdrawn(info.address, info.executor_epoch, num_requests))

    def lost(self, info: executor.ExecutorInfo, num_requests: int, why: str) -> None:
        """It is gone, and these requests go on elsewhere."""
        _log.warning(
            "executor_lost address=%s num_requests=%d reason=%r", info.address, num_requests, why
        )
        self._audit.record(ExecutorLost(info.address, info.executor_epoch, num_requests))
