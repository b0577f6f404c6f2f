"""Live view of a scheduler: its watchers, the pace of frames, and the state kept for watchers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from scheduler_service.scheduler import Scheduler
from scheduler_service.watching.live_history import History
from scheduler_service.watching.live_names import Names
from scheduler_service.watching.live_snapshot import LiveSnapshot, WatchedState
from scheduler_service.watching.transition import Submission, Transition
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_contract import DomainError

MAX_WATCHERS = 8
# Limit for all watchers together.
MAX_SNAPSHOTS_PER_SECOND = 10
_RETRY_S = 5.0
_NS_PER_MS = 1_000_000
_NS_PER_SNAPSHOT = 1_000_000_000 // MAX_SNAPSHOTS_PER_SECOND
# Frames take at most one part in FRAMES_PART of the event loop's time.
FRAMES_PART = 20

_Made = TypeVar("_Made")


class FramePacing:
    """Limits the time for frames to one part in `FRAMES_PART` of the event loop's time.

    After a frame, no new snapshot is made for 19 times as long as the frame took. `spent_ns`: CPU
    time of the thread, which does not depend on the load of the machine.
    """

    def __init__(self, spent_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._spent_ns = spent_ns
        # Earliest time of the next snapshot, in nanoseconds by the clock of turns.
        self.next_ns = 0

    def make(self, make: Callable[[], _Made], now_ns: Callable[[], int]) -> _Made:
        """Calls `make`, counts its CPU time, and returns its result.

        `now_ns`: the clock of turns.
        """
        begun_ns = self._spent_ns()
        try:
            return make()
        finally:
            took_ns = self._spent_ns() - begun_ns
            self.next_ns = max(self.next_ns, now_ns()) + (FRAMES_PART - 1) * took_ns


def _unix_ms() -> int:
    return time.time_ns() // _NS_PER_MS


def snapshot_number(now_ns: int) -> int:
    """Returns the number of the snapshot due at `now_ns`.

    Watchers with the same snapshot get the same frame.
    """
    return now_ns // _NS_PER_SNAPSHOT


class LiveView:
    """State of the scheduler that watchers of the live view are shown. Implements `Watcher`.

    Without watchers, only `history` is kept.
    """

    def __init__(
        self,
        unix_ms: Callable[[], int] = _unix_ms,
        number_of: Callable[[int], int] = snapshot_number,
        pace: FramePacing | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`unix_ms`: wall clock, read once per snapshot. `number_of`: snapshot number at a time.

        `now_ns`: the clock of turns.
        """
        self.pace = pace or FramePacing()
        self.history = History(now_ns)
        self.now_ns = now_ns
        self._unix_ms = unix_ms
        self._number_of = number_of
        # Set while there are watchers.
        self._watched: WatchedState | None = None
        self._snapshot: LiveSnapshot | None = None
        self._num_watchers = 0

    @contextmanager
    def watching(
        self, scheduler: Scheduler, submissions: Mapping[str, Submission]
    ) -> Iterator[LiveWatcher]:
        """Context manager of one watcher of `scheduler`. Raises DomainError(TOO_MANY_WATCHERS).

        `submissions`: those of unfinished requests, by request id.
        """
        if self._num_watchers >= MAX_WATCHERS:
            message = f"{self._num_watchers} calls watch already; allowed: {MAX_WATCHERS}"
            raise DomainError("TOO_MANY_WATCHERS", message, retry_delay_s=_RETRY_S)
        self._num_watchers += 1
        if self._watched is None:
            self._watched = WatchedState(scheduler, Names(submissions), self.history, {})
        try:
            yield LiveWatcher(self, self._watched)
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._watched = self._snapshot = None

    @property
    def is_idle(self) -> bool:
        """Whether the view has no watcher, and so keeps no state of executors and steps."""
        return self._watched is None

    def snapshot(self, watched: WatchedState) -> LiveSnapshot:
        """Returns the current snapshot, which is shared by all watchers.

        Makes a new one if it is due.
        """
        now_ns = self.now_ns()
        number = self._number_of(now_ns)
        is_due = now_ns >= self.pace.next_ns
        if self._snapshot is None or (self._snapshot.number != number and is_due):
            self._snapshot = watched.snapshot(number, now_ns, self._unix_ms(), self._snapshot)
        return self._snapshot

    # -- Turns ---------------------------------------------------------------------------------

    def see(self, turn: Transition) -> None:
        self.history.see(turn)
        if self._watched is not None:
            self._watched.see(turn)


class LiveWatcher:
    """Watcher of the live view. Moves from snapshot to snapshot at its own rate."""

    def __init__(self, view: LiveView, watched: WatchedState) -> None:
        self._view = view
        self._watched = watched
        self._before: LiveSnapshot | None = None

    def frame(self) -> live.WatchSchedulerResponse:
        """Returns the changes since the last frame.

        The frame may be shared and must not be changed. The time of this call counts for the pace
        of the view.
        """
        return self._view.pace.make(self._frame, self._view.now_ns)

    def _frame(self) -> live.WatchSchedulerResponse:
        snapshot = self._view.snapshot(self._watched)
        frame = snapshot.frame_after(self._before)
        self._before = snapshot
        return frame
