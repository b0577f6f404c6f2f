"""Who watches requests and steps go by, for metrics: `Observer`.

It is told at the edge of the cores, which know nothing of it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.request import Request


class Observer(Protocol):
    """What happens, when it happens. It raises nothing, and keeps nobody waiting."""

    def request_submitted(self, request: Request) -> None:
        """It was taken, and has its `client_key`."""
        ...

    def request_ended(self, request: Request) -> None:
        """Of those that were taken: it is over."""
        ...

    def tokens_delivered(self, events: StepEvents) -> None:
        """Clients were told of these."""
        ...

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        """To the executor at `address`; deciding and encoding it took so long."""
        ...

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        """Steps of an executor are answered in their order."""
        ...

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        """No step of it will be answered; `requests` go on elsewhere."""
        ...


class NoObserver:
    """Nobody watches. Implements `Observer`."""

    def request_submitted(self, request: Request) -> None:
        pass

    def request_ended(self, request: Request) -> None:
        pass

    def tokens_delivered(self, events: StepEvents) -> None:
        pass

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        pass

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        pass

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        pass


class Observers:
    """Several, told one after the other. Implements `Observer`."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def request_submitted(self, request: Request) -> None:
        for observer in self._observers:
            observer.request_submitted(request)

    def request_ended(self, request: Request) -> None:
        for observer in self._observers:
            observer.request_ended(request)

    def tokens_delivered(self, events: StepEvents) -> None:
        for observer in self._observers:
            observer.tokens_delivered(events)

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        for observer in self._observers:
            observer.step_sent(address, plan, planning_ns)

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        for observer in self._observers:
            observer.step_answered(address, outcome)

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        requests = list(requests)
        for observer in self._observers:
            observer.executor_gone(address, requests, is_lost=is_lost)
