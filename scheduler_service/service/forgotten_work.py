"""Work that nobody began, though nothing is in the way: a bug of ours, and no reason to hang."""

from __future__ import annotations

import asyncio
import logging

from scheduler_service.driver import Driver

_log = logging.getLogger(__name__)


class ForgottenWork:
    """Sees to it that what could begin begins, if there is no step from one look to the next.

    Whatever changes, `Scheduler` looks at requests that wait, so there is never anything to do
    here. If there is, the log says so, and no request waits for ever.
    """

    def __init__(self, cluster: Driver) -> None:
        self._cluster = cluster
        # Steps answered by the time of a look at which nothing was in flight; None: something was.
        self._num_steps: int | None = None

    async def look(self) -> None:
        """To be called now and then, with far more time between than a step takes to begin."""
        cluster = self._cluster
        # Whoever was woken by now, by what came while this process stood still, say, begins first.
        await asyncio.sleep(0)
        before = self._num_steps
        is_still = cluster.scheduler.has_work and not cluster.scheduler.is_computing
        self._num_steps = cluster.membership.num_steps_answered if is_still else None
        if not is_still or before != self._num_steps:
            return
        cluster.look_again()
        await asyncio.sleep(0)  # those that were woken plan their steps
        if cluster.scheduler.is_computing:
            _log.error("wake_up_missed num_unfinished=%d", cluster.num_unfinished)
