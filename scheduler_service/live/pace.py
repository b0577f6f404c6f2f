"""How often frames may be made: never so often that steps have to wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# Of the loop's time, one part in so many.
FRAMES_PART = 20

_Made = TypeVar("_Made")


class Pace:
    """Once something has been made, nothing new is due for 19 times as long as that took.

    `spent_ns`: the time that the loop's thread has computed; the machine's load is not in it.
    """

    def __init__(self, spent_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._spent_ns = spent_ns
        # By the clock of the scheduler: when there may be another moment.
        self.next_ns = 0

    def make(self, make: Callable[[], _Made], now_ns: Callable[[], int]) -> _Made:
        """What `make` returns, whose time is taken."""
        begun_ns = self._spent_ns()
        try:
            return make()
        finally:
            took_ns = self._spent_ns() - begun_ns
            self.next_ns = max(self.next_ns, now_ns()) + (FRAMES_PART - 1) * took_ns
