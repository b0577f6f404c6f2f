"""Whether a scheduler serves, and if not, why: by progress, not by pulse.

Pure: time is what callers say it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from scheduler_service.driver import Driver
from scheduler_service.service.open_calls import ForgottenWork


class Readiness(Enum):
    """Names of the contract (`Readiness` in scheduler.proto, which says what they mean)."""

    READY = "READY"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_PROGRESS = "NO_PROGRESS"
    EXECUTORS_FAILING = "EXECUTORS_FAILING"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is the case. `num_steps`: how many were ever answered.

    `num_failing`, `has_work`: of those connected.

    `step_allowed_s`: how long it may be until the next one is, if there is something to do.
    """

    is_draining: bool
    num_connected: int
    num_failing: int
    has_work: bool
    num_steps: int
    step_allowed_s: float


class ReadinessJudge:
    """Remembers since when nothing goes on."""

    def __init__(self) -> None:
        self._num_steps = -1
        self._since_ns = 0

    def judge(self, facts: Facts, now_ns: int) -> Readiness:
        """What holds now; to be asked again and again."""
        if facts.num_steps != self._num_steps or not (facts.has_work and facts.num_connected):
            self._num_steps, self._since_ns = facts.num_steps, now_ns
        if facts.is_draining:
            return Readiness.DRAINING
        if not facts.num_connected:
            return Readiness.NO_EXECUTOR
        if facts.num_failing >= facts.num_connected:
            return Readiness.EXECUTORS_FAILING
        if now_ns - self._since_ns > facts.step_allowed_s * 1e9:
            return Readiness.NO_PROGRESS
        return Readiness.READY


# -- Looks again and again whether the scheduler serves, and publishes it --------------------------

_PERIOD_S = 0.5

_log = logging.getLogger(__name__)


class ReadinessWatch:
    """`current`: what was published last."""

    def __init__(self, cluster: Driver, publish: Callable[[bool], Awaitable[None]]) -> None:
        """`publish`: is told whether requests are served now, where that has changed."""
        self._cluster = cluster
        self._publish = publish
        self._judge = ReadinessJudge()
        self._forgotten = ForgottenWork(cluster)
        self.current = Readiness.NO_EXECUTOR

    async def run(self, changed: asyncio.Event) -> None:
        """Looks when `changed` is set, and each half second. Until cancelled.

        And so that nobody else need look again and again, sees to what was forgotten.
        """
        await self._publish(False)
        while True:
            await _survive(self.look())
            try:
                await asyncio.wait_for(changed.wait(), _PERIOD_S)
            except TimeoutError:
                await _survive(self._forgotten.look())
            changed.clear()

    async def look(self) -> None:
        """Publishes what is the case now."""
        cluster = self._cluster
        there = [e for e in cluster.executors if e.is_connected and not e.is_draining]
        facts = Facts(
            cluster.is_draining,
            len(there),
            sum(engine.is_failing for engine in there),
            cluster.scheduler.has_work,
            cluster.membership.num_steps_answered,
            cluster.membership.step_allowed_s,
        )
        readiness = self._judge.judge(facts, cluster.now_ns())
        if readiness is self.current:
            return
        is_wished = readiness in {Readiness.READY, Readiness.DRAINING}
        level = logging.INFO if is_wished else logging.WARNING
        _log.log(
            level,
            "readiness_changed readiness=%s before=%s num_connected=%d num_unfinished=%d",
            readiness.value,
            self.current.value,
            facts.num_connected,
            cluster.num_unfinished,
        )
        await self._publish(readiness is Readiness.READY)
        self.current = readiness


async def _survive(look: Awaitable[None]) -> None:
    """Whatever it raises: to look no more would be to say for ever what was so once."""
    try:
        await look
    except Exception:
        _log.exception("readiness_watch_broken")
