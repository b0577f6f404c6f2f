"""Looks again and again whether the scheduler serves, and publishes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from scheduler_service.driver import Driver
from scheduler_service.service.forgotten_work import ForgottenWork
from scheduler_service.service.readiness import Facts, Readiness, ReadinessJudge

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
