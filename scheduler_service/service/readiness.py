"""Readiness of a scheduler, judged by the progress of steps: the judge, and the watch around it.

`ReadinessJudge` is pure: the caller passes the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from scheduler_service.driver import Driver


class Readiness(Enum):
    """Readiness as clients see it; `Readiness` in scheduler.proto defines the same names."""

    READY = "READY"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_PROGRESS = "NO_PROGRESS"
    EXECUTORS_FAILING = "EXECUTORS_FAILING"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class ReadinessInputs:
    """Facts about the scheduler at one moment, from which readiness is judged.

    `num_connected`: executors that are connected and do not drain; `num_failing` counts the failing
    executors among them. `num_steps`: steps answered since the process started. `step_allowed_s`:
    seconds until the next step must be answered, if there is work.
    """

    is_draining: bool
    num_connected: int
    num_failing: int
    has_work: bool
    num_steps: int
    step_allowed_s: float


class ReadinessJudge:
    """Judges readiness; remembers since when no step was answered although there was work."""

    def __init__(self) -> None:
        self._num_steps = -1
        self._since_ns = 0

    def judge(self, inputs: ReadinessInputs, now_ns: int) -> Readiness:
        """Returns the readiness at `now_ns`; to be called periodically."""
        if inputs.num_steps != self._num_steps or not (inputs.has_work and inputs.num_connected):
            self._num_steps, self._since_ns = inputs.num_steps, now_ns
        if inputs.is_draining:
            return Readiness.DRAINING
        if not inputs.num_connected:
            return Readiness.NO_EXECUTOR
        if inputs.num_failing >= inputs.num_connected:
            return Readiness.EXECUTORS_FAILING
        if now_ns - self._since_ns > inputs.step_allowed_s * 1e9:
            return Readiness.NO_PROGRESS
        return Readiness.READY


# -- Periodic judgement ----------------------------------------------------------------------------

_PERIOD_S = 0.5

_log = logging.getLogger(__name__)


class ReadinessWatch:
    """Judges the readiness of the scheduler periodically, and publishes changes.

    `current` is the readiness that was published last.
    """

    def __init__(self, cluster: Driver, publish: Callable[[bool], Awaitable[None]]) -> None:
        """`publish` is called with whether requests are served, whenever readiness has changed."""
        self._cluster = cluster
        self._publish = publish
        self._judge = ReadinessJudge()
        self._forgotten = StallWatchdog(cluster)
        self.current = Readiness.NO_EXECUTOR

    async def run(self, changed: asyncio.Event) -> None:
        """Judges readiness when `changed` is set, and every half second, until cancelled.

        Each half second without a change, the watchdog for forgotten work runs, too.
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
        """Judges readiness now, and publishes it if it has changed."""
        cluster = self._cluster
        there = [e for e in cluster.executors if e.is_connected and not e.is_draining]
        inputs = ReadinessInputs(
            cluster.is_draining,
            len(there),
            sum(engine.is_failing for engine in there),
            cluster.scheduler.has_work,
            cluster.membership.num_steps_answered,
            cluster.membership.step_allowed_s,
        )
        readiness = self._judge.judge(inputs, cluster.now_ns())
        if readiness is self.current:
            return
        is_wished = readiness in {Readiness.READY, Readiness.DRAINING}
        level = logging.INFO if is_wished else logging.WARNING
        _log.log(
            level,
            "readiness_changed readiness=%s before=%s num_connected=%d num_unfinished=%d",
            readiness.value,
            self.current.value,
            inputs.num_connected,
            cluster.num_unfinished,
        )
        await self._publish(readiness is Readiness.READY)
        self.current = readiness


async def _survive(look: Awaitable[None]) -> None:
    """Awaits `look`, and logs any exception.

    If the watch ended instead, the last published readiness would stay for ever.
    """
    try:
        await look
    except Exception:
        _log.exception("readiness_watch_broken")


# -- Recovery of forgotten work --------------------------------------------------------------------
#
# If work can start and no step is in flight, a wake-up was missed. That is a bug of ours, which
# must not make requests hang.


class StallWatchdog:
    """Watchdog that wakes the scheduler if it has work, but runs no step between two looks.

    `Scheduler` looks at the waiting requests after every event, so the watchdog should never find
    any work. If it does, it logs an error, and no request waits for ever.
    """

    def __init__(self, cluster: Driver) -> None:
        self._cluster = cluster
        # Steps answered until the last look, if there was work and no step in flight; else None.
        self._num_steps: int | None = None

    async def look(self) -> None:
        """Compares with the previous look, and wakes the scheduler if it stood still since.

        To be called periodically; the period must be much longer than the start of a step takes.
        """
        cluster = self._cluster
        # Callbacks that are already due run first, such as those from a stall of this process.
        await asyncio.sleep(0)
        before = self._num_steps
        is_still = cluster.scheduler.has_work and not cluster.scheduler.is_computing
        self._num_steps = cluster.membership.num_steps_answered if is_still else None
        if not is_still or before != self._num_steps:
            return
        cluster.look_again()
        await asyncio.sleep(0)  # lets woken callbacks plan their steps
        if cluster.scheduler.is_computing:
            _log.error("wake_up_missed num_unfinished=%d", cluster.num_unfinished)
