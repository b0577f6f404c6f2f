"""Of which requests there are traces."""

from __future__ import annotations

import random
from collections.abc import Callable


class Sampling:
    """Decides for each request, once.

    A caller who wants no trace gets none. One who wants a trace gets it as long as fewer than
    `most_asked_per_s` do, whoever they are: traces cost time, and nobody's request is to be slowed
    down by how many others ask for. All others, and what is beyond that, are drawn here: by the id
    of its trace a caller could have itself drawn each time. Where a process of ours has decided,
    which has the same bound for its callers, that is gone by, and counts for nothing here.
    """

    def __init__(
        self,
        ratio: float,
        most_asked_per_s: float,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `draw`: from 0 to below 1."""
        self._ratio = ratio
        self._most_asked_per_s = most_asked_per_s
        self._clock = clock
        self._draw = draw
        # A second's worth may come at once.
        self._num_left = self._most = max(1.0, most_asked_per_s) if most_asked_per_s else 0.0
        self._looked_s = clock()

    def takes(self, is_asked_for: bool | None, *, is_decided: bool = False) -> bool:
        """`is_asked_for`: what the caller said; None: nothing.

        `is_decided`: it is known of the caller that it samples as we do.
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
