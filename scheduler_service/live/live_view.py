"""Who watches, and what has to be remembered for them as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from scheduler_service.cluster import Cluster
from scheduler_service.core.plan import StepOutcome, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.live.names import Names
from scheduler_service.live.step_log import StepLog
from scheduler_service.live.watcher import Watcher
from scheduler_service.observer import NoObserver
from splitserve_rpc.domain_error import DomainError

MAX_WATCHERS = 8
_RETRY_S = 5.0
_NS_PER_MS = 1_000_000


def _unix_ms() -> int:
    return time.time_ns() // _NS_PER_MS


class LiveView(NoObserver):
    """Implements `Observer`; nothing is remembered while nobody watches.

    `logs`: steps of executors, by address.
    """

    def __init__(self, unix_ms: Callable[[], int] = _unix_ms) -> None:
        self._unix_ms = unix_ms
        self._cluster: Cluster | None = None
        self._names: Names | None = None
        self._num_watchers = 0
        # They begin with whoever watches first, and end with the last.
        self.logs: dict[str, StepLog] = {}

    @contextmanager
    def watching(self, cluster: Cluster) -> Iterator[Watcher]:
        """Somebody watches within. Raises DomainError(TOO_MANY_WATCHERS)."""
        if self._num_watchers >= MAX_WATCHERS:
            message = f"{self._num_watchers} watch already; allowed: {MAX_WATCHERS}"
            raise DomainError("TOO_MANY_WATCHERS", message, retry_delay_s=_RETRY_S)
        self._num_watchers += 1
        if self._names is None:
            self._cluster, self._names = cluster, Names(cluster)
        try:
            yield Watcher(cluster, self._names, self._log_of, self._unix_ms)
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._cluster = self._names = None
                self.logs.clear()

    def _log_of(self, address: str) -> StepLog:
        log = self.logs.get(address)
        if log is None:
            log = self.logs[address] = StepLog()
        return log

    # -- what happens --------------------------------------------------------------------------

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        if self._cluster is None or self._names is None:
            return
        log = self._log_of(address)
        for engine in self._cluster.engines:
            if engine.link.info.address == address:
                rows = engine.scheduler.placement.rows
                self._names.see(log.sent(plan, rows, self._cluster.now_ns()))

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        if self._cluster is not None:
            self._log_of(address).took(outcome, self._cluster.now_ns())

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        self.logs.pop(address, None)
