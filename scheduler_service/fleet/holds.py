"""Requests that wait for a busy executor that has their prefix, though another could begin them.

Delay scheduling (Zaharia 2010), with the rule of ski rental for how long: nobody waits longer than
what that may save, so it costs at most twice what whoever knew the future would pay. And nobody is
passed by more than a few who came later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.request import Request

MAX_PASSED = 8
# What may be saved, of what it costs at once; less is not worth an executor that could begin.
_LEAST_SAVED_RATIO = 0.2


@dataclass(slots=True)
class _Hold:
    until_ns: int
    num_passed: int = 0
    is_over: bool = False

    def end(self, now_ns: int) -> None:
        """It is over if that is true by now."""
        has_waited = now_ns >= self.until_ns or self.num_passed >= MAX_PASSED
        self.is_over = self.is_over or has_waited


class Holds:
    """Until when each of them waits at most, and by how many it was passed."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}

    def __bool__(self) -> bool:
        return bool(self._holds)

    def begins(self, request: Request, now_cost_ns: float, cost_ns: float, now_ns: int) -> bool:
        """Whether a request waits, or goes on waiting, because that costs so much less."""
        saved_ns = now_cost_ns - cost_ns
        if saved_ns <= _LEAST_SAVED_RATIO * now_cost_ns:
            return False
        hold = self._holds.setdefault(request.request_id, _Hold(now_ns + int(saved_ns)))
        hold.end(now_ns)
        return not hold.is_over

    def end(self, now_ns: int) -> None:
        """Whoever has waited long enough begins when it can: the end of its time is no news."""
        for hold in self._holds.values():
            hold.end(now_ns)

    @property
    def next_end_ns(self) -> int | None:
        """When the first of them has waited long enough."""
        return min((h.until_ns for h in self._holds.values() if not h.is_over), default=None)

    def has_begun(self, request_id: str) -> bool:
        """Whether a request waits for a busy executor, or did."""
        return request_id in self._holds

    def is_held(self, request_id: str) -> bool:
        """Whether a request waits for a busy executor, by what is known."""
        hold = self._holds.get(request_id)
        return hold is not None and not hold.is_over

    def may_be_passed(self, held: Iterable[Request]) -> bool:
        """Whether somebody who came later may begin before these."""
        return all(self._holds[request.request_id].num_passed < MAX_PASSED for request in held)

    def passed(self, held: Iterable[Request]) -> None:
        """Somebody who came later begins before these."""
        for request in held:
            self._holds[request.request_id].num_passed += 1

    def forget(self, request_id: str) -> None:
        """It does not wait any more."""
        self._holds.pop(request_id, None)
