"""Which executor gets a request, of those that could begin it now or soon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from scheduler_service.core.request import Request
from scheduler_service.fleet.host_state import HostState
from scheduler_service.fleet.prefix_index import Prefixes


class Choice(NamedTuple):
    """A host for a request, and what it costs there: least is best, if the router knows that.

    `num_cached`: tokens of it that the router found there.
    """

    state: HostState
    cost_ns: float = 0.0
    num_cached: int = 0


class Router(Protocol):
    """Compares hosts."""

    def add(self, state: HostState) -> None:
        """There is another host."""

    def remove(self, state: HostState) -> None:
        """A host is gone, or takes nobody any more."""

    def given(self, state: HostState, request: Request) -> None:
        """A host is about to get a request."""

    def step_begins(self, state: HostState) -> None:
        """A host is about to plan a step, or is looked at for another reason."""

    def seen(self, state: HostState) -> None:
        """A host was looked at."""

    def find(self, request: Request) -> Prefixes:
        """Returns which hosts have computed a prefix of a waiting request."""

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        """Iterates over hosts for a request, the best one first. `prefixes`: as `find` says."""


class LeastLoaded:
    """The host with the fewest tokens."""

    def add(self, state: HostState) -> None:
        pass

    def remove(self, state: HostState) -> None:
        pass

    def given(self, state: HostState, request: Request) -> None:
        pass

    def step_begins(self, state: HostState) -> None:
        pass

    def seen(self, state: HostState) -> None:
        pass

    def find(self, request: Request) -> Prefixes:
        return Prefixes()

    def rank(
        self, request: Request, states: Sequence[HostState], prefixes: Prefixes
    ) -> Iterator[Choice]:
        return map(Choice, sorted(states, key=_load))


def _load(state: HostState) -> int:
    return state.host.num_unfinished_tokens
