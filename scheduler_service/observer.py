"""Who watches requests and steps go by, for metrics and for the lives of requests: `Observer`.

It is told at the edge of the cores, which know nothing of it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_service.assignment import Assignment
from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.request import Request
from scheduler_service.request_names import RequestName
from scheduler_service.scheduler.effects import AcquittalReason, MoveReason


@dataclass(frozen=True, slots=True)
class Head:
    """One of the first that wait for an executor, and what keeps it from each, by address."""

    request: Request
    reasons: tuple[tuple[str, str], ...]


class Observer(Protocol):
    """What happens, when it happens. It raises nothing, and keeps nobody waiting."""

    @property
    def watches_heads(self) -> bool:
        """Whether it wants to be told by `heads_wait`: that has to be found out."""
        ...

    def request_refused(self, name: RequestName, tenant: str, reason: str, detail: str) -> None:
        """It was not taken. `detail`: what its client was told, with values and limits."""
        ...

    def request_submitted(self, request: Request, name: RequestName, num_waiting: int) -> None:
        """It was taken, and has its `client_key`. So many wait for an executor already."""
        ...

    def request_given(self, request: Request, address: str, assignment: Assignment | None) -> None:
        """The executor at `address` has it from now on, and begins it as soon as it can.

        `assignment`: why that one; None if that is not known.
        """
        ...

    def request_taken_back(self, request: Request, address: str, why: MoveReason) -> None:
        """The executor at `address` has it no more; it waits for one."""
        ...

    def request_quarantined(self, request: Request) -> None:
        """Executors may have died of it: from now on it is tried alone, `num_trials_left` times."""
        ...

    def request_acquitted(self, request: Request, why: AcquittalReason) -> None:
        """It is no longer tried alone, and runs with the others."""
        ...

    def heads_wait(self, heads: Sequence[Head]) -> None:
        """These are the first that wait for an executor; told now and then while some wait."""
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
    """Nobody watches. Implements `Observer`; others may implement what concerns them."""

    watches_heads = False

    def request_refused(self, name: RequestName, tenant: str, reason: str, detail: str) -> None:
        pass

    def request_submitted(self, request: Request, name: RequestName, num_waiting: int) -> None:
        pass

    def request_given(self, request: Request, address: str, assignment: Assignment | None) -> None:
        pass

    def request_taken_back(self, request: Request, address: str, why: MoveReason) -> None:
        pass

    def request_quarantined(self, request: Request) -> None:
        pass

    def request_acquitted(self, request: Request, why: AcquittalReason) -> None:
        pass

    def heads_wait(self, heads: Sequence[Head]) -> None:
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
    """Several, each told of everything, in their order. Implements `Observer`."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    @property
    def watches_heads(self) -> bool:
        return any(each.watches_heads for each in self._all)

    def request_refused(self, name: RequestName, tenant: str, reason: str, detail: str) -> None:
        for each in self._all:
            each.request_refused(name, tenant, reason, detail)

    def request_submitted(self, request: Request, name: RequestName, num_waiting: int) -> None:
        for each in self._all:
            each.request_submitted(request, name, num_waiting)

    def request_given(self, request: Request, address: str, assignment: Assignment | None) -> None:
        for each in self._all:
            each.request_given(request, address, assignment)

    def request_taken_back(self, request: Request, address: str, why: MoveReason) -> None:
        for each in self._all:
            each.request_taken_back(request, address, why)

    def request_quarantined(self, request: Request) -> None:
        for each in self._all:
            each.request_quarantined(request)

    def request_acquitted(self, request: Request, why: AcquittalReason) -> None:
        for each in self._all:
            each.request_acquitted(request, why)

    def heads_wait(self, heads: Sequence[Head]) -> None:
        for each in self._all:
            if each.watches_heads:
                each.heads_wait(heads)

    def request_ended(self, request: Request) -> None:
        for each in self._all:
            each.request_ended(request)

    def tokens_delivered(self, events: StepEvents) -> None:
        for each in self._all:
            each.tokens_delivered(events)

    def step_sent(self, address: str, plan: StepPlan, planning_ns: int) -> None:
        for each in self._all:
            each.step_sent(address, plan, planning_ns)

    def step_answered(self, address: str, outcome: StepOutcome) -> None:
        for each in self._all:
            each.step_answered(address, outcome)

    def executor_gone(self, address: str, requests: Iterable[Request], *, is_lost: bool) -> None:
        # Whoever goes through them leaves them for the next.
        requests = list(requests)
        for each in self._all:
            each.executor_gone(address, requests, is_lost=is_lost)
