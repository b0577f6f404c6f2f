"""Scheduler of all executors: `handle` takes an event and the time, and returns effects.

Deterministic: no I/O, no clock, no randomness. Every unfinished request is in one place: in the
queue, in quarantine, among those to be retried, or at the engine of one executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar, assert_never

from scheduler_service.assignment import AssignedFor, Assignment
from scheduler_service.core.config import FleetConfig, SchedulerConfig
from scheduler_service.core.plan import ContractBroken, StepEvents, StepOutcome, StepStatus
from scheduler_service.core.planning.arrival_checks import check_request, fits
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import QUEUE_FULL_RETRY_S
from scheduler_service.core.scheduler import Scheduler as Engine
from scheduler_service.fleet.executor_losses import Loss, LossCause
from scheduler_service.fleet.fleet_queue import FleetQueue, Given
from scheduler_service.fleet.hindrances import Hindrances
from scheduler_service.fleet.host_state import Host
from scheduler_service.fleet.moves import has_waited, to_be_moved
from scheduler_service.fleet.quarantine import Quarantine, Verdict
from scheduler_service.scheduler.effects import (
    AcquittalReason,
    DeliverTokens,
    Effect,
    EngineFailed,
    ExecutorGone,
    ExecutorHealthChanged,
    ExecutorServes,
    HealthChange,
    MoveReason,
    RequestAcquitted,
    RequestAssigned,
    RequestBlamed,
    RequestFinished,
    RequestMoved,
    RequestQuarantined,
    SendStep,
    WakeAt,
)
from scheduler_service.scheduler.events import (
    Event,
    ExecutorConnected,
    ExecutorDoubted,
    ExecutorDrainExpired,
    ExecutorDraining,
    ExecutorEvent,
    ExecutorJoined,
    ExecutorLost,
    ExecutorUndrained,
    RequestAborted,
    RequestSubmitted,
    StepCompleted,
    TenantsWeighed,
    Tick,
)
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.health import (
    Changed,
    ExecutorHealth,
    Probe,
    Withdraw,
    make_suspect,
)
from scheduler_service.scheduler.rescue import end_with_fault, rescue
from splitserve_rpc.domain_error import DomainError

# A deadline is past when the clock is beyond it.
_PAST_NS = 1_000_000
_ALONE = Assignment(AssignedFor.TRIED_ALONE)
_RETRY = Assignment(AssignedFor.RETRIED)
_DRAINED = "it was drained"

_Result = TypeVar("_Result")


class _EngineBroke(Exception):
    """A call of an engine raised; its executor is about to be removed."""


@dataclass(slots=True)
class Place:
    """An unfinished request, and the executor that has it; None for no executor."""

    request: Request
    executor: ExecutorState | None = None


@dataclass(frozen=True, slots=True)
class _Expected:
    """Configuration of an executor that left and is expected back until `until_ns`."""

    config: SchedulerConfig
    until_ns: int


class Scheduler:
    """Requests and executors, and which executor computes which request.

    `executors`: by address, in order of registration. `places`: of all unfinished requests, by id.
    """

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self.now_ns = 0
        self.executors: dict[str, ExecutorState] = {}
        self.places: dict[str, Place] = {}
        self._queue = FleetQueue(config.queue_policy, config.tenant_weights)
        self._quarantine = Quarantine(
            config.max_executor_losses, refuses_late=self._queue.refuses_late
        )
        # Requests that failed on an executor, and go to another one before all that wait.
        self._retries: dict[str, Request] = {}
        self._health = ExecutorHealth(self.executors)
        self._expected: list[_Expected] = []
        self._last_config: SchedulerConfig | None = None
        self._effects: list[Effect] = []
        # Executors for which a step is to be planned by the next tick.
        self._awake: dict[str, None] = {}
        # Whether requests are to be dispatched before `handle` returns, wherever they fit.
        self._is_dispatch_due = False
        self._broken: list[ExecutorState] = []
        self._draining: dict[str, ExecutorState] = {}
        # When to plan steps of executors again though nothing happens, by address.
        self._asks_at_ns: dict[str, int] = {}
        self._wakes_at_ns: int | None = None

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Handles `event` at `now_ns`, which never decreases; returns effects in order.

        Raises ValueError for an executor whose configuration makes no sense; then nothing changed.
        """
        self.now_ns = now_ns
        match event:
            case StepCompleted():
                self._step_completed(event)
            case RequestSubmitted():
                self._submit(event.request)
            case Tick():
                self._tick(looks_everywhere=event.looks_everywhere)
            case RequestAborted():
                self._abort(event.request_id)
            case TenantsWeighed():
                self._queue.weigh_tenants(event.weights)
            case _:
                self._handle_of_executor(event)
        self._settle()
        effects, self._effects = self._effects, []
        return effects

    def _handle_of_executor(self, event: ExecutorEvent) -> None:
        match event:
            case ExecutorJoined():
                self._join(event)
            case ExecutorConnected():
                self._serve(event.address)
            case ExecutorDoubted():
                self._doubted(event.address, is_doubtful=event.is_doubtful)
            case ExecutorDraining():
                self._drain(event.address)
            case ExecutorDrainExpired():
                self._drain_expired(event.address)
            case ExecutorUndrained():
                self._undrain(event.address)
            case ExecutorLost():
                executor = self.executors.get(event.address)
                if executor is not None:
                    self._remove(executor, event.cause, event.why)
            case _:
                assert_never(event)

    # -- what is known -------------------------------------------------------------------------

    @property
    def taking_requests(self) -> list[ExecutorState]:
        """Executors that may be given requests."""
        return [each for each in self.executors.values() if each.takes_requests]

    @property
    def num_waiting(self) -> int:
        """Requests that no executor has."""
        return len(self._queue) + len(self._retries) + self._quarantine.num_waiting

    @property
    def num_queued(self) -> int:
        """Requests in the waiting queue."""
        return len(self._queue)

    @property
    def num_quarantined(self) -> int:
        """Requests in quarantine that no executor has."""
        return self._quarantine.num_waiting

    @property
    def num_unfitting(self) -> int:
        """Waiting requests that fit no executor that takes requests."""
        engines = [executor.engine for executor in self.taking_requests]
        # Whoever waits in quarantine begins at once wherever it fits, or waits for an executor.
        num_isolated = 0 if self._quarantine.is_holding else self._quarantine.num_waiting
        return self._queue.num_unfitting(engines) + num_isolated

    @property
    def has_work(self) -> bool:
        """Whether some connected executor has a request, or could run one that waits."""
        engines = [each.engine for each in self.executors.values() if each.is_connected]
        has_requests = any(engine.num_unfinished for engine in engines)
        return has_requests or bool(self._retries) or self._queue.any_fits(engines)

    @property
    def is_computing(self) -> bool:
        """Whether a step of any executor is in flight."""
        return any(each.engine.num_in_flight for each in self.executors.values())

    @property
    def largest_config(self) -> SchedulerConfig | None:
        """Configuration of the connected executor with the longest `max_len`, else of the last."""
        return max(self._connected, key=lambda config: config.max_len, default=self._last_config)

    @property
    def max_num_seqs(self) -> int:
        """Most sequences side by side on a connected executor, or on the last to join."""
        last = 0 if self._last_config is None else self._last_config.max_num_seqs
        return max((config.max_num_seqs for config in self._connected), default=last)

    @property
    def _connected(self) -> list[SchedulerConfig]:
        return [
            executor.config
            for executor in self.executors.values()
            if executor.is_connected and not executor.is_draining
        ]

    def first_waiting(self, limit: int) -> list[Request]:
        """The first `limit` requests of the queue."""
        return self._queue.first(self.now_ns, limit)

    def heads(self) -> list[tuple[Request, list[tuple[str, str]]]]:
        """First requests of the queue, each with (address, blocker) of executors."""
        addresses: dict[Host, str] = {each.engine: each.address for each in self.taking_requests}

        def named(hindrances: Hindrances) -> list[tuple[str, str]]:
            return [(addresses[host], why.value) for host, why in hindrances]

        heads = self._queue.heads(self.now_ns, addresses.keys())
        return [(request, named(hindrances)) for request, hindrances in heads]

    def check(self, request: Request) -> None:
        """Raises DomainError if no executor can run `request`, or too many requests wait.

        An executor is expected back for `executor_return_s` after it left. Where none is here or
        expected, the last one that joined stands for those to come.
        """
        self._check_fits(request)
        num_places = self._config.max_num_waiting * max(1, len(self.taking_requests))
        if not self._queue.has_place(request, num_places):
            message = f"{len(self._queue)} requests wait; allowed: {num_places}"
            if len(self._queue) < num_places:
                message += ", of which some are left to tenants that have fewer"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=QUEUE_FULL_RETRY_S)

    def _check_fits(self, request: Request) -> None:
        executors = self.executors.values()
        here = [each.config for each in executors if each.takes_requests]
        others = [each.config for each in executors if not each.takes_requests]
        configs = [*here, *others, *(each.config for each in self._expected)]
        fitting = next((config for config in configs if fits(request, config)), None)
        for config in [fitting] if fitting is not None else here:
            check_request(request, config)
        if fitting is None and (largest := self.largest_config) is not None:
            check_request(request, largest)

    # -- requests ------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        assert request.request_id not in self.places, "request id in use"
        request.submitted_ns = self.now_ns
        self.places[request.request_id] = Place(request)
        self._queue.push(request)
        self._dispatch([])

    def _abort(self, request_id: str) -> None:
        place = self.places.get(request_id)
        if place is None:
            return
        executor = place.executor
        if executor is not None:
            self._ask(executor, "abort", lambda: executor.engine.abort(request_id))
            self._deliver_ended(executor)
            self._wake(executor)
        if executor is None or executor.is_broken:
            place.request.abort_unscheduled()
            self._end(place.request)

    def _end(self, request: Request) -> None:
        """A request ended that no engine has."""
        self._forget(request.request_id)
        self._effects.append(RequestFinished(request))

    def _forget(self, request_id: str) -> None:
        self._queue.forget(request_id)
        self._retries.pop(request_id, None)
        self._quarantine.forget(request_id)
        self._health.request_ended(request_id)
        self.places.pop(request_id, None)

    def _deliver(self, events: StepEvents) -> None:
        """Takes note of what a step brought, and has clients told."""
        for request in events.acquitted:
            self._effects.append(RequestAcquitted(request, AcquittalReason.CAME_THROUGH))
        self._queue.charge(events.num_sampled)
        events.finished = [each for each in events.finished if not self._health.probe_ended(each)]
        for request in events.finished:
            self._forget(request.request_id)
        self._effects.append(DeliverTokens(events))

    def _deliver_ended(self, executor: ExecutorState) -> None:
        """Has clients told what ended by a decision of the engine; mostly nothing did."""
        if executor.is_broken:
            return
        events = self._ask(executor, "take_ended", executor.engine.take_ended)
        if events is not None and events.any_ended:
            self._deliver(events)

    # -- executors -----------------------------------------------------------------------------

    def _join(self, event: ExecutorJoined) -> None:
        engine = Engine(event.config, event.last_step_id)
        known = self.executors.get(event.address)
        if known is not None:
            self._remove(known, LossCause.DIED, "a new executor answers at its address")
        self.executors[event.address] = ExecutorState(
            event.address, event.epoch, event.config, engine, event.num_credits
        )

    def _serve(self, address: str) -> None:
        executor = self.executors.get(address)
        if executor is None:
            return
        self._last_config = executor.config
        self._expected = [each for each in self._expected if each.config != executor.config]
        executor.is_withdrawn = executor.is_failing = self._health.is_withdrawn(executor.life)
        executor.is_connected = True
        self._effects.append(ExecutorServes(address))
        self._executor_takes_requests()
        self._wake(executor)

    def _executor_takes_requests(self) -> None:
        """Looks for requests that an executor which takes requests again, or is new, may begin."""
        self._health.executor_changed()
        if self.num_unfitting:
            self._end_unfitting()
        self._is_dispatch_due = True

    def _doubted(self, address: str, *, is_doubtful: bool) -> None:
        executor = self.executors.get(address)
        if executor is None or executor.is_doubtful == is_doubtful:
            return
        executor.is_doubtful = is_doubtful
        if not is_doubtful and executor.is_connected:
            self._executor_takes_requests()

    def _drain(self, address: str) -> None:
        executor = self.executors.get(address)
        if executor is None or executor.is_draining:
            return
        executor.is_draining = True
        self._draining[address] = executor
        self._move_all(executor, executor.engine.queued_request_ids)

    def _drain_expired(self, address: str) -> None:
        executor = self.executors.get(address)
        if executor is not None and executor.is_draining and not executor.is_broken:
            self._move_all(executor, executor.engine.unfinished_request_ids)

    def _undrain(self, address: str) -> None:
        executor = self.executors.get(address)
        if executor is not None and executor.is_draining:
            executor.is_draining = False
            executor.num_moved = 0
            del self._draining[address]
            self._executor_takes_requests()

    def _move_all(self, executor: ExecutorState, request_ids: Iterable[str]) -> None:
        """Takes requests back from an executor that drains."""
        taken = (self._withdraw(executor, request_id) for request_id in request_ids)
        moved = [request for request in taken if request is not None]
        executor.num_moved += len(moved)
        self._quarantine.executor_lost(moved, self._loss(executor, LossCause.BLAMELESS))
        for request in moved:
            if request.request_id in self.places:
                self._effects.append(RequestMoved(request, executor.address, MoveReason.DRAINED))
        self._take_back(executor, moved)
        self._is_dispatch_due = True

    def _remove(
        self, executor: ExecutorState, cause: LossCause, why: str, *, is_drained: bool = False
    ) -> None:
        """Closes the engine of an executor; its requests go on elsewhere."""
        del self.executors[executor.address]
        for others in (self._awake, self._draining, self._asks_at_ns):
            others.pop(executor.address, None)
        executor.is_connected = False
        if self._last_config is not None:
            self._expect(executor.config)
        rescued = rescue(executor)
        for call, error in rescued.faults:
            self._effects.append(EngineFailed(executor.address, call, error))
        self._health.executor_gone(executor)
        if cause is LossCause.WITHDRAWN:
            for request in rescued.requests:
                self._effects.append(RequestMoved(request, executor.address, MoveReason.WITHDRAWN))
        self._effects.append(
            ExecutorGone(
                executor.address,
                executor.epoch,
                cause,
                why,
                rescued.requests,
                executor.engine.last_step_id,
                is_drained=is_drained,
                num_moved=executor.num_moved,
            )
        )
        self._take_over(executor, rescued.requests, cause)

    def _take_over(
        self, executor: ExecutorState, requests: Sequence[Request], cause: LossCause
    ) -> None:
        """Requeues, quarantines or ends the requests of an executor that is gone."""
        # The owners of others are gone.
        lost = [request for request in requests if self._runs_at(executor, request.request_id)]
        verdict = self._quarantine.executor_lost(lost, self._loss(executor, cause))
        self._announce(verdict)
        self._take_back(executor, lost)
        for request in verdict.released:
            self._queue.push(request)
        for request in verdict.failed:
            if request.request_id in self.places:
                self._end(request)  # it was recalled from the executor
        for place in [left for left in self.places.values() if left.executor is executor]:
            # An engine so broken that it could not even give this one back, or say how it ended.
            if place.request.error is None:
                end_with_fault(place.request)
            self._end(place.request)
        self._is_dispatch_due = True

    def _expect(self, config: SchedulerConfig) -> None:
        """Records that an executor with `config` is expected back."""
        kept = [each for each in self._expected if each.config != config]
        until_ns = self.now_ns + round(self._config.executor_return_s * 1e9)
        self._expected = [*kept, _Expected(config, until_ns)]

    def _give_up_expecting(self) -> None:
        expected = [each for each in self._expected if each.until_ns > self.now_ns]
        if len(expected) < len(self._expected):
            self._expected = expected
            self._end_unfitting()

    def _end_unfitting(self) -> None:
        """Ends waiting requests that no executor can run which is here or expected back.

        While no executor is connected, nobody knows what those to come can run.
        """
        if not any(executor.is_connected for executor in self.executors.values()):
            return
        for place in [each for each in self.places.values() if each.executor is None]:
            try:
                self._check_fits(place.request)
            except DomainError as error:
                within_s = self._config.executor_return_s
                message = f"{error.message}; none that could came back within {within_s:g} s"
                place.request.fail_unscheduled(error.reason, message)
                self._end(place.request)

    def _loss(self, executor: ExecutorState, cause: LossCause) -> Loss:
        num_living = len(self.taking_requests) + 1
        loss = Loss(cause, executor.life, self.now_ns, executor.has_answered, num_living)
        if cause.says_nothing:
            return loss
        engine = executor.engine
        in_flight, num_steps = engine.requests_in_flight, max(1, engine.num_in_flight)
        return replace(loss, in_flight=in_flight, num_steps=num_steps)

    def _take_back(self, executor: ExecutorState, requests: Iterable[Request]) -> None:
        for request in sorted(requests, key=lambda moved: moved.arrival):
            if not self._runs_at(executor, request.request_id):
                continue  # its owner is gone
            self.places[request.request_id] = Place(request)
            if request.is_finished:
                self._end(request)
            elif not self._quarantine.holds(request):
                self._queue.push(request)

    def _runs_at(self, executor: ExecutorState, request_id: str) -> bool:
        place = self.places.get(request_id)
        return place is not None and place.executor is executor

    def _announce(self, verdict: Verdict) -> None:
        self._effects += [RequestQuarantined(request) for request in verdict.isolated]
        self._effects += [RequestBlamed(request) for request in verdict.failed]
        for request in verdict.excused:
            self._effects.append(RequestAcquitted(request, AcquittalReason.ANOTHER_FAILED))

    # -- calls of engines ----------------------------------------------------------------------

    def _ask(
        self, executor: ExecutorState, name: str, call: Callable[[], _Result]
    ) -> _Result | None:
        """Calls the engine of an executor; None if that raised: the executor will be removed."""
        try:
            return self._call(executor, name, call)
        except _EngineBroke:
            return None

    def _call(self, executor: ExecutorState, name: str, call: Callable[[], _Result]) -> _Result:
        """Calls the engine of an executor, which is sound. Raises ContractBroken, _EngineBroke."""
        executor.engine.tick(self.now_ns)
        try:
            return call()
        except ContractBroken:
            raise
        except Exception as error:
            executor.is_broken = True
            self._broken.append(executor)
            self._effects.append(EngineFailed(executor.address, name, error))
            raise _EngineBroke from error

    def _withdraw(self, executor: ExecutorState, request_id: str) -> Request | None:
        """Takes a request back from an executor; None if that has no such request."""
        if executor.is_broken:
            return None
        moved = self._ask(executor, "withdraw", lambda: executor.engine.withdraw(request_id))
        self._deliver_ended(executor)
        self._wake(executor)
        return moved

    def _admit(self, executor: ExecutorState, request: Request) -> None:
        """Gives an executor a request that was checked."""
        self._ask(executor, "readmit", lambda: executor.engine.readmit(request))
        self._deliver_ended(executor)
        self._wake(executor)

    # -- steps ---------------------------------------------------------------------------------

    def _step_completed(self, event: StepCompleted) -> None:
        executor = self.executors.get(event.address)
        if executor is None or executor.is_broken:
            return
        executor.engine.tick(self.now_ns)
        try:
            if event.was_sent:
                self._judge(executor, event.outcome)
            events = self._apply(executor, event.outcome)
        except ContractBroken as broken:
            why = f"it broke the step contract: {broken}"
            self._remove(executor, LossCause.DIED, why)
            return
        except _EngineBroke:
            return
        self._plan_steps(executor)
        self._deliver(events)
        self._deliver_ended(executor)

    def _judge(self, executor: ExecutorState, outcome: StepOutcome) -> None:
        """Takes requests away that are to be tried on another executor."""
        judgement = self._health.judge(executor, outcome)
        if judgement is None:
            return
        if judgement.failed_probe is not None:
            self._withdraw(executor, judgement.failed_probe.request_id)
        moved = []
        for request in judgement.moves:
            taken = self._withdraw(executor, request.request_id)
            if taken is not None:
                if judgement.num_suspects:
                    make_suspect(taken, judgement.num_suspects)
                moved.append(taken)
        moved = [each for each in moved if self._runs_at(executor, each.request_id)]
        if moved:
            self._quarantine.executor_lost(moved, self._loss(executor, LossCause.WITHDRAWN))
        for request in moved:
            reason = MoveReason.FAILED_THERE
            self._effects.append(RequestMoved(request, executor.address, reason))
            self.places[request.request_id] = Place(request)
            if not self._quarantine.holds(request):
                self._retries[request.request_id] = request
        self._is_dispatch_due |= bool(moved)
        if executor.is_broken:
            raise _EngineBroke

    def _apply(self, executor: ExecutorState, outcome: StepOutcome) -> StepEvents:
        engine = executor.engine
        try:
            events = self._call(executor, "apply", lambda: engine.apply(outcome))
        except _EngineBroke:  # a result that breaks the contract leaves nothing half taken
            was_taken = engine.oldest_step_in_flight != outcome.step_id
            executor.has_lost_events = was_taken and outcome.status is StepStatus.OK
            raise
        executor.has_answered = True
        return events

    def _plan_steps(self, executor: ExecutorState) -> None:
        """Sends steps to an executor while it has something to do, and credits."""
        engine = executor.engine
        self._asks_at_ns.pop(executor.address, None)
        while engine.num_in_flight < executor.num_credits:
            self._refill(executor)
            if executor.is_broken:
                return
            plan = self._ask(executor, "schedule", engine.schedule)
            if executor.is_broken:
                return
            if plan is None:
                if engine.num_in_flight == 0:
                    # Whoever was given before may have ended since, and kept others out: no result
                    # will come after which they are looked at again.
                    self._refill(executor)
                if engine.is_behind:
                    self._wake(executor)
                elif engine.ask_again_at_ns is not None and engine.num_in_flight == 0:
                    self._asks_at_ns[executor.address] = engine.ask_again_at_ns
                return
            self._effects.append(SendStep(executor.address, plan))

    def _wake(self, executor: ExecutorState) -> None:
        """Has the next tick plan steps of an executor, after all that arrived together."""
        self._awake[executor.address] = None

    def _tick(self, *, looks_everywhere: bool) -> None:
        self._wakes_at_ns = None
        for waiting in (self._queue, self._quarantine):
            for request in waiting.take_overdue(self.now_ns):
                self._end(request)
        self._give_up_expecting()
        next_probe_ns = self._health.next_probe_ns
        self._health.is_due |= next_probe_ns is not None and next_probe_ns <= self.now_ns
        self._dispatch(None if looks_everywhere else [])
        awake, self._awake = self._awake, {}
        for address, at_ns in self._asks_at_ns.items():
            if at_ns <= self.now_ns:
                awake[address] = None
        for address in list(self.executors) if looks_everywhere else awake:
            executor = self.executors.get(address)
            if executor is not None and not executor.is_broken:
                self._plan_steps(executor)
                self._deliver_ended(executor)

    # -- what follows before `handle` returns --------------------------------------------------

    def _settle(self) -> None:
        """Does what others left to be done once they are through."""
        while True:
            if self._broken:
                executor = self._broken.pop()
                if self.executors.get(executor.address) is executor:
                    why = "its engine failed"
                    self._remove(executor, LossCause.BLAMELESS, why)
            elif self._health.is_due:
                self._act_on_health()
            elif self._is_dispatch_due:
                self._is_dispatch_due = False
                self._dispatch()
                if self._quarantine.num_waiting and not self._quarantine.is_holding:
                    # It has outgrown all executors, or else it would be at one by now.
                    self._end_unfitting()
            else:
                break
        for executor in list(self._draining.values()):
            if not executor.engine.num_unfinished:
                self._remove(executor, LossCause.BLAMELESS, _DRAINED, is_drained=True)
        at_ns = self._next_wake_ns
        if at_ns != self._wakes_at_ns:
            self._wakes_at_ns = at_ns
            self._effects.append(WakeAt(at_ns))

    @property
    def _next_wake_ns(self) -> int | None:
        if self._awake or self._is_dispatch_due:
            return 0
        looks = [self._queue.next_look_ns, self._quarantine.next_look_ns]
        looks.append(self._health.next_probe_ns)
        looks += [each.until_ns for each in self._expected]
        times = [at_ns + _PAST_NS if at_ns else at_ns for at_ns in looks if at_ns is not None]
        return min([*times, *self._asks_at_ns.values()], default=None)

    def _act_on_health(self) -> None:
        for action in self._health.act(self.now_ns):
            executor = action.executor
            match action:
                case Withdraw():
                    if self.executors.get(executor.address) is executor:
                        self._remove(executor, LossCause.WITHDRAWN, action.why)
                case Probe():
                    if not executor.is_broken:
                        self._admit(executor, action.request)
                case Changed():
                    change = ExecutorHealthChanged(executor.address, action.change)
                    self._effects.append(change)
                    if action.change is not HealthChange.PROBE_FAILED:
                        self._executor_takes_requests()
                case _:
                    assert_never(action)

    # -- who goes where ------------------------------------------------------------------------

    def _refill(self, executor: ExecutorState) -> None:
        """An executor is about to plan a step: it may begin what waits."""
        if not executor.takes_requests:
            return
        if len(self._queue):
            self._dispatch([executor])
            return
        engine = executor.engine
        self._queue.note(engine)
        if engine.openings.nobody_waits:
            # Mostly nobody waits anywhere, and whether one could begin here needs no answer.
            givers = [e for e in self.taking_requests if has_waited(e.engine, self.now_ns)]
            if givers and engine.openings.is_open:
                self._move_one([executor], givers)
        elif has_waited(engine, self.now_ns):
            idle = [each for each in self.taking_requests if not each.engine.num_unfinished]
            self._move_one(idle, [executor])

    def _move_one(self, takers: Sequence[ExecutorState], givers: Sequence[ExecutorState]) -> None:
        """Some executor has nobody to begin: perhaps somebody waits at another."""
        by_engine: dict[Host, ExecutorState] = {each.engine: each for each in givers}
        for taker in takers:
            found = to_be_moved(self.now_ns, taker.engine, by_engine)
            if found is not None:
                host, request_id = found
                self._take_from(by_engine[host], request_id, MoveReason.BEGINS_SOONER_ELSEWHERE)
                self._dispatch([taker, by_engine[host]])
                return

    def _take_from(self, executor: ExecutorState, request_id: str, reason: MoveReason) -> None:
        """Takes a request back from an executor that is to begin elsewhere."""
        moved = self._withdraw(executor, request_id)
        if moved is None:
            return
        self.places[request_id] = Place(moved)
        self._effects.append(RequestMoved(moved, executor.address, reason))
        if reason is MoveReason.LAST_EXECUTOR:
            self._quarantine.recalled(moved)
        else:
            self._queue.push(moved)

    def _dispatch(self, changed: Collection[ExecutorState] | None = None) -> None:
        """Gives requests to executors that can begin them; `changed`: of these, None for all."""
        by_engine: dict[Host, ExecutorState] = {e.engine: e for e in self.taking_requests}
        changed_hosts: list[Host] | None = None
        if changed is not None:
            changed_hosts = [each.engine for each in changed if each.takes_requests]
        now_ns = self.now_ns
        for request_id, host in self._quarantine.to_recall(list(by_engine), now_ns):
            self._take_from(by_engine[host], request_id, MoveReason.LAST_EXECUTOR)
        isolated = self._quarantine.dispatch(
            list(by_engine),
            now_ns,
            lambda request, host: self._health.avoids(request, by_engine[host]),
        )
        retried = self._dispatch_retries(by_engine)
        given = self._queue.dispatch(
            now_ns,
            by_engine.keys(),
            changed_hosts,
            lambda host, request_id: self._take_from(
                by_engine[host], request_id, MoveReason.BEGINS_SOONER_ELSEWHERE
            ),
        )
        alone = (Given(request, host, _ALONE) for request, host in isolated)
        for request, host, assignment in chain(retried, alone, given):
            executor = by_engine[host]
            self.places[request.request_id].executor = executor
            self._effects.append(RequestAssigned(request, executor.address, assignment))
            if not executor.is_broken:
                self._admit(executor, request)
            if executor.is_broken:  # it gives the request back, and then there is more to do
                break

    def _dispatch_retries(self, by_engine: Mapping[Host, ExecutorState]) -> Iterator[Given]:
        """Places retries on the least busy executor where they did not fail, if there is one.

        While all such are slow to answer, retries wait for them.
        """
        for request in list(self._retries.values()):
            executors = self.executors.values()
            fitting = [e for e in executors if not e.is_broken and e.engine.fits(request)]
            others = [e for e in fitting if e.is_serving and not self._health.avoids(request, e)]
            hosts = [each.engine for each in others or fitting if each.engine in by_engine]
            if hosts and self._retries.pop(request.request_id, None) is not None:
                least_busy = min(hosts, key=lambda host: host.num_unfinished_tokens)
                yield Given(request, least_busy, _RETRY)
