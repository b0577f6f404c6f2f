"""An engine with a waiting queue of its own, for tests that have one engine and no scheduler."""

from __future__ import annotations

from typing import Any

from scheduler_service.journal.checkpoint import dump_state, load_state
from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.engine.outcomes.losses import detach
from scheduler_service.scheduler.engine.planning.arrival_checks import check_request
from scheduler_service.scheduler.queue.queue_policy import make_queue_policy
from scheduler_service.scheduler.queue.waiting_queue import WaitingQueue
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import StepEvents, StepOutcome, StepPlan
from scheduler_service.scheduler.values.request import FinishReason, Request, RequestStatus
from splitserve_rpc.domain_error import DomainError


class EngineWithQueue(Engine):
    """Waiting, running and preempted requests of one executor; does what a scheduler does."""

    def __init__(self, config: SchedulerConfig, last_step_id: int = 0) -> None:
        policy = make_queue_policy(config.queue_policy, config.tenant_weights)
        self.queue = WaitingQueue(policy)
        super().__init__(config, self.queue, last_step_id)

    def restored(self) -> EngineWithQueue:
        """Returns a copy of the engine, restored from a checkpoint."""
        copy: Any = object.__new__(EngineWithQueue)
        vars(copy).update(load_state(dump_state(vars(self)), dict))
        assert copy.queue is copy.placement.queue
        return copy  # type: ignore[no-any-return]

    # -- state -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row and have no KV."""
        return len(self.queue) + super().num_waiting

    @property
    def num_unfinished(self) -> int:
        """Number of running, preempted and waiting requests."""
        return len(self.queue) + super().num_unfinished

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Requests that began, then those that wait."""
        return [*super().unfinished_request_ids, *(request.request_id for request in self.queue)]

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of all unfinished sequences."""
        waiting = (s for request in self.queue for s in request.unfinished)
        return super().num_unfinished_tokens + sum(len(s.token_ids) for s in waiting)

    @property
    def is_queue_full(self) -> bool:
        """Whether `add` refuses any request."""
        return len(self.queue) >= self._config.max_num_waiting

    def find(self, request_id: str) -> Request | None:
        """Returns the unfinished request with this id, if it is here."""
        return self.queue.get(request_id) or self.placement.requests.get(request_id)

    def has_place(self, request: Request) -> bool:
        """Returns whether the queue takes a new request."""
        return self.queue.has_place(request.scheduling.tenant, self._config.max_num_waiting)

    # -- events in ---------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Sets the time; deadlines and waiting times are measured by it."""
        super().tick(now_ns)
        self.queue.tick(now_ns)

    def check(self, request: Request) -> None:
        """Raises DomainError if `request` can never run here."""
        check_request(request, self._config)

    def add(self, request: Request) -> None:
        """Takes a new request. Raises DomainError if it can never run, or if the queue is full.

        A request that has all its tokens already (by resuming) is finished at once.
        """
        self.check(request)
        if not self.has_place(request):
            raise DomainError("QUEUE_FULL", f"{len(self.queue)} requests wait")
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

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in any state and returns it; None for an unknown id."""
        self._check_open()
        request = self.find(request_id)
        if request is not None:
            self.placement.finish(request, FinishReason.ABORTED)
            self.queue.ended(request.request_id)
        return request

    def withdraw(self, request_id: str) -> Request | None:
        """Removes a request in any state and returns it; None for an unknown id."""
        self._check_open()
        request = self.find(request_id)
        if request is None:
            return None
        moved = detach(request, self.placement)
        self.placement.remove(request)
        self.queue.ended(request.request_id)
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
        """Plans the next step; returns None without work."""
        plan = self.plan_step(self.queue)
        self.queue.take_begun()
        return plan

    def apply(self, outcome: StepOutcome) -> StepEvents:
        """Learns from a result; see `Engine.apply`."""
        events = super().apply(outcome)
        self.queue.charge(events.num_sampled)
        return events

    def _add_ended(self, events: StepEvents) -> StepEvents:
        events = super()._add_ended(events)
        for request in events.finished:
            self.queue.ended(request.request_id)
        return events
