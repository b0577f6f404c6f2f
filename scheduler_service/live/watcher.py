"""One who watches: brought from moment to moment, as often as it is ready for the next."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.live.moment import Moment
from splitserve.scheduler.v1 import live_pb2 as live


class Watcher:
    """`now`: the moment that is shared by all who ask. `paced`: makes something, and takes time."""

    def __init__(
        self,
        now: Callable[[], Moment],
        paced: Callable[[Callable[[], live.WatchSchedulerResponse]], live.WatchSchedulerResponse],
    ) -> None:
        self._now = now
        self._paced = paced
        self._before: Moment | None = None

    def frame(self) -> live.WatchSchedulerResponse:
        """What has changed since its last one; others may get the same, so nobody changes it."""
        return self._paced(self._frame)

    def _frame(self) -> live.WatchSchedulerResponse:
        moment = self._now()
        frame = moment.frame_after(self._before)
        self._before = moment
        return frame
