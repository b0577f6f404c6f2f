"""Sampling of requests for traces."""

from __future__ import annotations

import random
from collections.abc import Callable


class Sampling:
    """Decides for each request, once, whether it has a trace.

    A caller who wants no trace gets none. A caller who wants one gets it, up to `most_asked_per_s`
    for all callers together: traces cost time, and no request may be slowed down by how many others
    ask for traces. All further requests are drawn at random with probability `ratio`. The draw does
    not depend on the trace id, since a caller could choose an id that always wins. A decision of
    another splitserve process, which applies the same limit to its callers, is followed and does
    not count here.
    """

    def __init__(
        self,
        ratio: float,
        most_asked_per_s: float,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `draw`: returns a number from 0 to below 1."""
        self._ratio = ratio
        self._most_asked_per_s = most_asked_per_s
        self._clock = clock
        self._draw = draw
        # Burst: the traces of one second may be asked for at once.
        self._num_left = self._most = max(1.0, most_asked_per_s) if most_asked_per_s else 0.0
        self._looked_s = clock()

    def takes(self, is_asked_for: bool | None, *, is_decided: bool = False) -> bool:
        """Returns whether a request has a trace. `is_asked_for`: the caller's wish; None for none.

        `is_decided`: the caller is a splitserve process that samples by the same rules.
        """
        if is_asked_for is False:
            return False
        if is_asked_for and (is_decided or self._take_asked()):
            return True
        return self._draw() < self._ratio

    def _take_asked(self) -> bool:
        now_s = self._clock()
        self._num_left += (now_s - self._looked_s) * self._most_asked_per_s
        self._num_left = min(self._num_left, self._most)
        self._looked_s = now_s
        if self._num_left < 1.0:
            return False
        self._num_left -= 1.0
        return True
