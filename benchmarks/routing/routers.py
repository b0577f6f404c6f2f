"""Whom the router of prefixes is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.prefix_index import Prefixes
from scheduler_service.fleet.prefix_router import PrefixRouter
from scheduler_service.fleet.router import Choice, LeastLoaded, Router


class RoundRobin(LeastLoaded):
    """One after the other, whoever can."""

    def __init__(self) -> None:
        self._next = 0

    def given(self, state: HostState, request: Request) -> None:
        self._next = state.number + 1

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        return map(Choice, sorted(states, key=lambda s: (s.number < self._next, s.number)))


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixRouter,
}
