"""Which executor gets a request, of those that could begin it now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from scheduler_service.core.planning.openings import Openings
from scheduler_service.core.request import Request


class Host(Protocol):
    """An executor as the fleet sees it: its core."""

    openings: Openings

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of all its unfinished sequences."""

    def fits(self, request: Request) -> bool:
        """Whether the request could ever run there."""

    def recompute_ns(self, num_tokens: int) -> int:
        """What computing so many tokens again takes there; 0 if that is not known yet."""

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of the request that need not be computed there."""


class Router(Protocol):
    """Chooses among hosts."""

    def choose(self, request: Request, hosts: Iterable[Host]) -> Host | None:
        """The best of `hosts` for a request; None if there are none."""


class LeastLoaded:
    """The host with the fewest tokens."""

    def choose(self, request: Request, hosts: Iterable[Host]) -> Host | None:
        return min(hosts, key=_load, default=None)


def _load(host: Host) -> int:
    return host.num_unfinished_tokens
