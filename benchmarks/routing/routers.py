"""Whom the router of prefixes is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from scheduler_service.scheduler.routing import (
    Choice,
    HostState,
    LeastLoaded,
    Prefixes,
    PrefixRouter,
    Router,
)
from scheduler_service.scheduler.values import Request


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
