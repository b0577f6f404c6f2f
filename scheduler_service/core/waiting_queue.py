"""The waiting queue: first come, first served, by arrival and not by time of queueing."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from scheduler_service.core.request import Request


class WaitingQueue:
    """Requests in order of arrival. A preempted request is older than those behind it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Adds `request` at its place by arrival."""
        insort(self._requests, request, key=lambda waiting: waiting.arrival)

    def peek(self) -> Request | None:
        """The oldest request, or None."""
        return self._requests[0] if self._requests else None

    def pop(self) -> Request:
        """Removes and returns the oldest request."""
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        """Removes `request`, which must be here."""
        self._requests.remove(request)
