"""An engine with a waiting queue of its own: the scheduler of one executor.

Its owner gives it requests before it can begin them, by `readmit`, and asks `openings` which it
could begin. Both end when one queue serves all engines: then this module and
`planning/openings.py` go.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.engine import Engine
from scheduler_service.core.outcomes.evacuation import detach
from scheduler_service.core.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.core.planning.openings import Openings
from scheduler_service.core.queue.queue_policy import make_queue_policy
from scheduler_service.core.queue.waiting_queue import WaitingQueue
from scheduler_service.core.request import FinishReason, Request, RequestStatus
from splitserve_rpc.domain_error import DomainError

QUEUE_FULL_RETRY_S = 1.0


class Scheduler(Engine):
    """Waiting, running and preempted requests of one executor."""

    def __init__(self, config: SchedulerConfig, last_step_id: int = 0) -> None:
        policy = make_queue_policy(config.queue_policy, config.tenant_weights)
        self.queue = WaitingQueue(policy)
        super().__init__(config, self.queue, last_step_id)
        # What it could begin, for whoever has requests for several cores.
        self.openings = Openings(config, self.placement)

    # -- state -------------------------------------------------------------------------------------

    @property
    def queued(self) -> Iterator[Request]:
        """Requests that wait for a row and have no KV: preempted ones, then the queue."""
        preempted = self.placement.preempted
        return chain((r for r in preempted if r.status is RequestStatus.PREEMPTED), self.queue)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row and have no KV."""
        return len(self.queue) + self.num_preempted - self.num_swapped

    @property
    def num_unfinished(self) -> int:
        """Requests it has."""
        return len(self.queue) + len(self.placement.requests)

    @property
    def queued_request_ids(self) -> list[str]:
        """Requests that have no row: preempted ones, then those that wait."""
        return [request.request_id for request in chain(self.placement.preempted, self.queue)]

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Requests it has: those that began, then those that wait."""
        return [*self.placement.requests, *(request.request_id for request in self.queue)]

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of all unfinished sequences; the load a router compares."""
        waiting = (s for request in self.queue for s in request.unfinished)
        return super().num_unfinished_tokens + sum(len(s.token_ids) for s in waiting)

    @property
    def is_queue_full(self) -> bool:
        """Whether `add` refuses whatever comes."""
        return len(self.queue) >= self._config.max_num_waiting

    def find(self, request_id: str) -> Request | None:
        """Returns the unfinished request with this id, if it is here."""
        return self.queue.get(request_id) or self.placement.requests.get(request_id)

    def has_place(self, request: Request) -> bool:
        """Returns whether the queue takes `request`, if it is a new one."""
        return self.queue.has_place(request.scheduling.tenant, self._config.max_num_waiting)

    # -- events in ---------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Sets the time; deadlines and waiting times are measured by it."""
        super().tick(now_ns)
        self.queue.tick(now_ns)

    def add(self, request: Request) -> None:
        """Takes a new request. Raises DomainError if it can never run, or if the queue is full.

        A request that has all its tokens already (by resuming) is finished at once.
        """
        self.check(request)
        if not self.has_place(request):
            message = f"{len(self.queue)} requests wait; allowed: {self._config.max_num_waiting}"
            if not self.is_queue_full:
                message += ", of which some are left to tenants that have fewer"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=QUEUE_FULL_RETRY_S)
        self.readmit(request)

    def readmit(self, request: Request) -> None:
        """Takes a request that was accepted before, however long the queue is."""
        self._check_open()
        assert self.find(request.request_id) is None, "request id in use"
        if request.trial_size:
            self.adopt(request)
        else:
            request.status = RequestStatus.WAITING
            self.queue.push(request)
            self.prepare(request)
        self.openings.given(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is; None if there is no such request."""
        self._check_open()
        request = self.find(request_id)
        if request is not None:
            self.placement.finish(request, FinishReason.ABORTED)
            self.queue.ended(request.request_id)
            self.openings.changed()
        return request

    def withdraw(self, request_id: str) -> Request | None:
        """Gives a request away in whatever state it is; None if there is no such request."""
        self._check_open()
        request = self.find(request_id)
        if request is None:
            return None
        moved = detach(request, self.placement)
        self.placement.remove(request)
        self.queue.ended(request.request_id)
        self.openings.changed()
        return moved

    def evacuate(self) -> list[Request]:
        """Returns all requests, ready for `readmit` elsewhere; see `Engine.evacuate`."""
        begun = super().evacuate()
        waiting = [detach(request, self.placement) for request in self.queue]
        for request in waiting:
            request.was_in_flight = False
        return [*begun, *waiting]

    # -- steps -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Decides the next step; None if there is nothing to compute now."""
        plan = self.plan_step(self.queue)
        self.openings.step_planned(self.placement.draft.lacks if plan is None else plan.lacks)
        return plan

    def apply(self, outcome: StepOutcome) -> StepEvents:
        """Learns from a result; see `Engine.apply`."""
        events = super().apply(outcome)
        self.queue.charge(events.num_sampled)
        self.openings.changed()
        return events

    def _add_ended(self, events: StepEvents) -> StepEvents:
        events = super()._add_ended(events)
        for request in events.finished:
            self.queue.ended(request.request_id)
        return events
