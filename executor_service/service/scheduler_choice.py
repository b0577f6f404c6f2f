"""Which of several schedulers an executor prefers, and for how long it has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from hashlib import blake2b


def ranked(schedulers: Collection[str], executor: str) -> list[str]:
    """`schedulers`, the one that `executor` prefers first: rendezvous hashing.

    All executors come to their order without asking anybody. One scheduler more or less moves only
    those that prefer it, or did. Source: Thaler and Ravishankar 1998.
    """
    return sorted(schedulers, key=lambda scheduler: _weight(scheduler, executor), reverse=True)


def _weight(scheduler: str, executor: str) -> bytes:
    return blake2b(f"{scheduler} {executor}".encode(), digest_size=8).digest()


class Steadiness:
    """Whether something has been the same for long enough. Another one begins anew."""

    def __init__(self, hold_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """`hold_s`: asked each time that it begins anew. `clock`: monotonic seconds."""
        self._hold_s = hold_s
        self._clock = clock
        self._wanted: str | None = None
        self._steady_at_s = 0.0

    def is_steady(self, wanted: str | None) -> bool:
        """Whether `wanted` is what it was, each time since, for that long. None never is."""
        if wanted is None or wanted != self._wanted:
            self._wanted, self._steady_at_s = wanted, self._clock() + self._hold_s()
        return wanted is not None and self._clock() >= self._steady_at_s
