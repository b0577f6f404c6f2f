"""Lanes of the waiting queue: requests apart by their group and their adapter.

So any number of requests that an engine cannot begin is passed at once: those that do not fit it,
and those whose adapter has no slot there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_service.core.request import Request

# A group (which engines requests fit) and an adapter.
Lane: TypeAlias = tuple[str, str]
# The lanes to look at; None for all.
Lanes: TypeAlias = Collection[Lane] | None


@dataclass(slots=True)
class OpenLanes:
    """The adapters and groups whose requests a reader wants to see; None for all.

    The reader may change it between two requests.
    """

    adapters: Collection[str] | None = None
    groups: Collection[str] | None = None


class WaitingLanes:
    """The lane of each waiting request."""

    def __init__(self) -> None:
        self._lanes: dict[Request, Lane] = {}
        self._num_in = Counter[Lane]()
        self._num_of_group = Counter[str]()

    def put(self, request: Request, group: str) -> None:
        """Puts a request, which has a lane or has none yet, into that of this group."""
        if request in self._lanes:
            self.remove(request)
        lane = group, request.scheduling.adapter
        self._lanes[request] = lane
        self._num_in[lane] += 1
        self._num_of_group[group] += 1

    def remove(self, request: Request) -> None:
        """Forgets a request that does not wait any more."""
        lane = self._lanes.pop(request)
        self._num_in[lane] -= 1
        if not self._num_in[lane]:
            del self._num_in[lane]
        self._num_of_group[lane[0]] -= 1
        if not self._num_of_group[lane[0]]:
            del self._num_of_group[lane[0]]

    def of(self, request: Request) -> Lane:
        """Returns the lane of a waiting request."""
        return self._lanes[request]

    def select(self, open_lanes: OpenLanes) -> Lanes:
        """Returns the lanes that are open."""
        adapters, groups = open_lanes.adapters, open_lanes.groups
        if adapters is None:
            return None if groups is None else [e for e in self._num_in if e[0] in groups]
        groups = self._num_of_group if groups is None else groups
        return [(group, adapter) for group in groups for adapter in adapters]
