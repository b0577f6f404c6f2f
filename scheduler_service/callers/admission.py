"""On what terms a request was let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler_service.core.request import Request
from scheduler_service.request_names import RequestName


class Charge(Protocol):
    """What a request costs its tenant. After `begin` comes `end`, once."""

    def begin(self) -> None:
        """It is taken."""
        ...

    def end(self, request: Request) -> None:
        """It has ended, in whatever way; `request` has its tokens."""
        ...


class _Free:
    """Costs nobody anything. Implements `Charge`."""

    def begin(self) -> None:
        pass

    def end(self, request: Request) -> None:
        pass


FREE: Charge = _Free()


@dataclass(frozen=True, slots=True)
class Admission:
    """`name`: what the request is called; its `request_id` is the key of that.

    `trace_id`: of its trace, empty if there is none. `caller`: name of who submitted it.
    """

    name: RequestName
    charge: Charge = FREE
    trace_id: str = ""
    caller: str = ""
