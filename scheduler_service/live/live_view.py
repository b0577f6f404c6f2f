"""Who watches, and what has to be remembered for them as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler_service.driver import Driver
from scheduler_service.live.history import History
from scheduler_service.live.moment import Moment, Watched
from scheduler_service.live.names import Names
from scheduler_service.live.pace import Pace
from scheduler_service.live.watcher import Watcher
from scheduler_service.watching.turn import Turn
from splitserve_rpc.domain_error import DomainError

MAX_WATCHERS = 8
# However many watch, and however they do.
MAX_MOMENTS_PER_SECOND = 10
_RETRY_S = 5.0
_NS_PER_MS = 1_000_000
_NS_PER_MOMENT = 1_000_000_000 // MAX_MOMENTS_PER_SECOND


def _unix_ms() -> int:
    return time.time_ns() // _NS_PER_MS


def moment_number(now_ns: int) -> int:
    """Which moment that is: whoever asks within one gets the same."""
    return now_ns // _NS_PER_MOMENT


class LiveView:
    """What watchers of a live view are shown. Implements `Watcher`.

    While nobody watches, nothing but its `history` is remembered.
    """

    def __init__(
        self,
        unix_ms: Callable[[], int] = _unix_ms,
        number_of: Callable[[int], int] = moment_number,
        pace: Pace | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`unix_ms`: asked once a moment. `number_of`: of the moment, by the clock in ns.

        `now_ns`: the clock of the cluster.
        """
        self.pace = pace or Pace()
        self.history = History(now_ns)
        self._unix_ms = unix_ms
        self._number_of = number_of
        # They begin with whoever watches first, and end with the last.
        self._watched: Watched | None = None
        self._moment: Moment | None = None
        self._num_watchers = 0

    @contextmanager
    def watching(self, cluster: Driver) -> Iterator[Watcher]:
        """Somebody watches within. Raises DomainError(TOO_MANY_WATCHERS)."""
        if self._num_watchers >= MAX_WATCHERS:
            message = f"{self._num_watchers} watch already; allowed: {MAX_WATCHERS}"
            raise DomainError("TOO_MANY_WATCHERS", message, retry_delay_s=_RETRY_S)
        self._num_watchers += 1
        watched = self._watched
        if watched is None:
            names = Names(cluster.tracked)
            watched = self._watched = Watched(cluster, names, self.history, {})
        try:
            clock = cluster.now_ns
            yield Watcher(lambda: self._now(watched), lambda make: self.pace.make(make, clock))
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._watched = self._moment = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is remembered of executors and their steps."""
        return self._watched is None

    def _now(self, watched: Watched) -> Moment:
        now_ns = watched.cluster.now_ns()
        number = self._number_of(now_ns)
        is_due = now_ns >= self.pace.next_ns
        if self._moment is None or (self._moment.number != number and is_due):
            self._moment = watched.moment(number, self._unix_ms(), self._moment)
        return self._moment

    # -- turns ---------------------------------------------------------------------------------

    def see(self, turn: Turn) -> None:
        self.history.see(turn)
        if self._watched is not None:
            self._watched.see(turn)
