"""The time since 1970, as epochs are, by a clock that is never set back."""

from __future__ import annotations

import time
from collections.abc import Callable

# Goes on while the machine is suspended, where there is such a clock.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _since_boot_ns() -> int:
    return time.clock_gettime_ns(_STEADY)


def steady_clock(
    wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = _since_boot_ns
) -> Callable[[], int]:
    """A clock in nanoseconds: what the wall clock says, or, if it was set back, would say.

    An epoch that was not from the future then does not become so.
    """
    offset_ns = wall_ns() - steady_ns()
    return lambda: max(wall_ns(), steady_ns() + offset_ns)
