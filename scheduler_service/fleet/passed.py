"""Those who begin nowhere, in one go through the queue, and how far that goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from scheduler_service.core.request import Request

# How many that can begin nowhere are passed in one go; bounds the work.
_MAX_BLOCKED = 16
# Of those that fit the same hosts, none of them open, so many are looked at: the most urgent one,
# and before it two that have a turn.
_MAX_MISFITS = 3
# So many are told apart by the hosts that they fit; then it is gone on after a moment.
_MAX_JUDGED = 128


class Waits(Enum):
    """Why nobody gets a request now."""

    FOR_ROOM = "for room"
    FOR_ONE_THAT_IS_BUSY = "for one that is busy"
    FOR_ONE_THAT_IT_FITS = "for one that it fits"


@dataclass(slots=True)
class Passed:
    """Those who begin nowhere, in one go through the queue.

    `num_judged`: whose lane was found out. `closed_lanes`: of whom nobody else need be looked at.
    """

    blocked: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    num_judged: int = 0
    closed_lanes: set[str] = field(default_factory=set)
    _num_misfits: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request, waits: Waits) -> None:
        """One more, that fits hosts that are open."""
        (self.held if waits is Waits.FOR_ONE_THAT_IS_BUSY else self.blocked).append(request)

    def add_misfit(self, lane: str) -> None:
        """One more, that fits none of them."""
        self._num_misfits[lane] += 1
        if self._num_misfits[lane] == _MAX_MISFITS:
            self.closed_lanes.add(lane)

    @property
    def is_cut_short(self) -> bool:
        """Whether whoever comes behind them might begin, and it was enough for one go."""
        return self.num_judged >= _MAX_JUDGED

    def is_end(self, *, allows_bypasses: bool) -> bool:
        """Whether those behind them wait, too."""
        if self.blocked and not allows_bypasses:
            return True
        num_passed = len(self.blocked) + len(self.held)
        return num_passed >= _MAX_BLOCKED or self.is_cut_short
