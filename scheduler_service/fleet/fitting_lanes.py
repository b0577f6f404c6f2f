"""Those who wait, apart by the kinds of hosts that they fit, as far as somebody had to know.

So that any number of those who fit no host that is open is passed at once. Whom a kind of hosts
fits is known for good; when there is a new kind, whoever was judged before has to be judged anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import Host

# Of those who were not judged.
_UNJUDGED = ""


class _Lane(NamedTuple):
    """Who fits these kinds of hosts, of the first `num_kinds` that ever were."""

    num_kinds: int
    kinds: frozenset[int]
    name: str


class FittingLanes:
    """The lanes of requests that wait; a request that was not judged is in a lane with others."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._num_in: Counter[_Lane] = Counter()

    def name_of(self, request: Request) -> str:
        """The lane that a request is in."""
        lane = self._lanes.get(request.request_id)
        return _UNJUDGED if lane is None else lane.name

    def is_judged(self, request: Request, num_kinds: int) -> bool:
        """Whether it is known which of the kinds that there are by now a request fits."""
        lane = self._lanes.get(request.request_id)
        return lane is not None and lane.num_kinds == num_kinds

    def judge(self, request: Request, hosts: Mapping[int, Host], num_kinds: int) -> None:
        """Finds out whom a request fits. `hosts`: one of each kind."""
        self.forget(request.request_id)
        kinds = sorted(kind for kind, host in hosts.items() if host.fits(request))
        lane = _Lane(num_kinds, frozenset(kinds), f"{num_kinds}:{','.join(map(str, kinds))}")
        self._lanes[request.request_id] = lane
        self._num_in[lane] += 1

    def forget(self, request_id: str) -> None:
        """It does not wait any more."""
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            self._num_in[lane] -= 1
            if not self._num_in[lane]:
                del self._num_in[lane]

    def all_but(self, closed: set[str]) -> Collection[str] | None:
        """All lanes, or all but those with these names."""
        if not closed:
            return None
        return [_UNJUDGED, *(lane.name for lane in self._num_in if lane.name not in closed)]

    def num_fitting_none(self, kinds: set[int]) -> int:
        """How many of those who were judged fit none of these kinds of hosts."""
        return sum(num for lane, num in self._num_in.items() if lane.kinds.isdisjoint(kinds))
