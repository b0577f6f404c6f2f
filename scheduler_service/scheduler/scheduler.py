"""Scheduler of all executors: `handle` takes an event and the time, and returns effects.

Deterministic: no I/O, no clock, no randomness. Every unfinished request is in one place: in the
waiting queue, in quarantine, or at the engine of one executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar, assert_never

from scheduler_service.scheduler.capabilities import Capabilities
from scheduler_service.scheduler.effects import (
    AcquittalReason,
    DeliverTokens,
    Effect,
    EngineFailed,
    ExecutorGone,
    ExecutorHealthChanged,
    ExecutorServes,
    HealthChange,
    LoadAdapter,
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
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.engine.planning import fits, prepare_request
from scheduler_service.scheduler.events import (
    AdapterLoaded,
    AdapterRegistered,
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
    StepProgressed,
    TenantsWeighed,
    Tick,
)
from scheduler_service.scheduler.executor_losses import Loss, LossCause
from scheduler_service.scheduler.executor_state import (
    ExecutorState,
    end_with_fault,
    rescue,
    saw_too_many_break,
)
from scheduler_service.scheduler.health import (
    ExecutorHealth,
    HealthChanged,
    Probe,
    WithdrawExecutor,
    make_suspect,
)
from scheduler_service.scheduler.preempted_moves import PreemptedMoves
from scheduler_service.scheduler.quarantine import (
    MAX_OVERDUE,
    Quarantine,
    QuarantineDecision,
    end_overdue,
)
from scheduler_service.scheduler.queue import WaitingQueue, make_queue_policy
from scheduler_service.scheduler.routing import PrefixRouter, Router, Routing, RoutingBlocker
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    AssignedFor,
    Assignment,
    ContractBroken,
    FleetConfig,
    Request,
    RequestStatus,
    SchedulerConfig,
    StepEvents,
    StepOutcome,
    StepStatus,
)
from splitserve_contract import DomainError

# Added to wake times: a deadline is past only once the clock is beyond it.
_PAST_NS = 1_000_000
_MAX_HEADS = 4
_MAX_HEAD_EXECUTORS = 8
QUEUE_FULL_RETRY_S = 1.0
_ALONE = Assignment(AssignedFor.TRIED_ALONE)
_DRAINED = "the executor was drained"

_Result = TypeVar("_Result")


class _EngineBroke(Exception):
    """Raised when an engine call raised; its executor is about to be removed."""


@dataclass(slots=True)
class RequestLocation:
    """Place of an unfinished request: the executor that has it, or None."""

    request: Request
    executor: ExecutorState | None = None


class Scheduler:
    """Places requests at executors: handles events, plans steps, and returns effects.

    `executors`: executors by address, in order of registration. `places`: places of all unfinished
    requests, by request id.
    """

    def __init__(self, config: FleetConfig, router: Router | None = None) -> None:
        """Creates a scheduler without executors.

        `router`: compares executors; None for a `PrefixRouter`, by cached prefixes and load.
        """
        self._config = config
        self.now_ns = 0
        self.executors: dict[str, ExecutorState] = {}
        self.locations: dict[str, RequestLocation] = {}
        self.queue = WaitingQueue(make_queue_policy(config.queue_policy, config.tenant_weights))
        self._quarantine = Quarantine(
            config.max_executor_losses, refuses_late=self.queue.refuses_late
        )
        self._health = ExecutorHealth(self.executors)
        self._routing = Routing(self.queue, router or PrefixRouter(), self._health.closed_to)
        return_ns = round(config.executor_return_s * 1e9)
        self.capabilities = Capabilities(self.executors, return_ns)
        self._preempted_moves = PreemptedMoves(self.queue, self._routing)
        self._effects: list[Effect] = []
        # Addresses of executors for which the next tick plans steps.
        self._awake: dict[str, None] = {}
        # Addresses of executors that have credits left and nothing to compute.
        self._idle: dict[str, None] = {}
        # Whether executors or their requests changed, so that any waiting request may begin
        # anywhere.
        self._has_changed = False
        self._broken: list[ExecutorState] = []
        self._draining: dict[str, ExecutorState] = {}
        # Times in ns at which to plan steps again without any event, by address.
        self._asks_at_ns: dict[str, int] = {}
        self._wakes_at_ns: int | None = None

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Handles `event` at `now_ns`, which never decreases; returns effects in order.

        Raises ValueError for an executor whose configuration is invalid; then the state is
        unchanged.
        """
        self.now_ns = now_ns
        self.queue.tick(now_ns)
        match event:
            case StepCompleted():
                self._step_completed(event)
            case StepProgressed():
                self._step_progressed(event)
            case RequestSubmitted():
                self._submit(event.request)
            case Tick():
                self._tick(looks_everywhere=event.looks_everywhere)
            case RequestAborted():
                self._abort(event.request_id)
            case AdapterRegistered():
                self._adapter_registered(event.adapter)
            case TenantsWeighed():
                self.queue.weigh_tenants(event.weights)
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
            case AdapterLoaded():
                self._adapter_loaded(event)
            case ExecutorLost():
                executor = self.executors.get(event.address)
                if executor is not None:
                    self._remove(executor, event.cause, event.why)
            case _:
                assert_never(event)

    # -- queries -------------------------------------------------------------------------------

    @property
    def taking_requests(self) -> list[ExecutorState]:
        """Executors that take requests."""
        return [each for each in self.executors.values() if each.takes_requests]

    @property
    def num_waiting(self) -> int:
        """Number of requests that no executor has."""
        return len(self.queue) + self._quarantine.num_waiting

    @property
    def num_queued(self) -> int:
        """Number of requests in the waiting queue."""
        return len(self.queue)

    @property
    def num_quarantined(self) -> int:
        """Number of quarantined requests that no executor has."""
        return self._quarantine.num_waiting

    @property
    def num_unfitting(self) -> int:
        """Number of waiting requests that fit no executor that takes requests."""
        # A quarantined request that fits an executor begins at once, unless the quarantine holds
        # it.
        num_isolated = 0 if self._quarantine.is_holding else self._quarantine.num_waiting
        return self._routing.num_unfitting(self.taking_requests) + num_isolated

    @property
    def has_work(self) -> bool:
        """Whether a connected executor has a request, or could run a waiting one."""
        connected = [each for each in self.executors.values() if each.is_connected]
        if any(executor.engine.num_unfinished for executor in connected):
            return True
        configs: list[SchedulerConfig] = []
        for executor in connected:
            if executor.config not in configs:
                configs.append(executor.config)
        return any(fits(request, config) for request in self.queue for config in configs)

    @property
    def is_about_to_plan(self) -> bool:
        """Whether the next tick plans steps."""
        may_begin = self._routing.is_stale and self._idle and len(self.queue)
        return bool(self._awake or may_begin)

    @property
    def is_computing(self) -> bool:
        """Whether a step of any executor is in flight."""
        return any(each.engine.num_in_flight for each in self.executors.values())

    def first_waiting(self, limit: int) -> list[Request]:
        """Returns the first `limit` requests of the waiting queue."""
        return list(islice(self.queue.candidates(), limit))

    def heads(self) -> list[tuple[Request, list[tuple[str, str]]]]:
        """Returns the first requests of the queue, each with (address, blocker) of executors.

        At most _MAX_HEADS requests and _MAX_HEAD_EXECUTORS executors.
        """
        executors = self.taking_requests[:_MAX_HEAD_EXECUTORS]
        return [
            (request, [(e.address, self.obstacle(request, e).value) for e in executors])
            for request in islice(self.queue.candidates(), _MAX_HEADS)
        ]

    def obstacle(
        self, request: Request, executor: ExecutorState
    ) -> AdmissionBlocker | RoutingBlocker:
        """Returns the known reason why a waiting request does not begin at an executor."""
        return self._routing.obstacle(request, executor)

    def check(self, request: Request) -> None:
        """Raises DomainError if no executor can run `request`, or if the queue is full.

        An executor is expected back for `executor_return_s` after it left. While no executor is
        connected or expected, the last one that served stands for executors to come.
        """
        self.capabilities.check_fits(request)
        executors = self.taking_requests
        num_places = self._config.max_num_waiting * max(1, len(executors))
        if self.queue.has_place(request.scheduling.tenant, num_places):
            return
        # Requests that free rows can take begin with the next steps.
        num_places += sum(each.engine.num_free_rows for each in executors if each.engine.has_room)
        if not self.queue.has_place(request.scheduling.tenant, num_places):
            message = f"{len(self.queue)} requests wait; allowed: {num_places}"
            if len(self.queue) < num_places:
                message += ", some of them reserved for tenants with fewer requests"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=QUEUE_FULL_RETRY_S)

    # -- requests ------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        assert request.request_id not in self.locations, "request id in use"
        request.submitted_ns = self.now_ns
        self.locations[request.request_id] = RequestLocation(request)
        if self.capabilities.last_config is not None:
            prepare_request(request, self.capabilities.last_config)
        self._push(request)

    def _push(self, request: Request) -> None:
        """Has a request wait in the queue; no executor has it."""
        request.status = RequestStatus.WAITING
        self._routing.push(request)

    def _abort(self, request_id: str) -> None:
        place = self.locations.get(request_id)
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
        """Reports the end of a request that no engine has."""
        self._forget(request)
        self._effects.append(RequestFinished(request))

    def _forget(self, request: Request) -> None:
        request_id = request.request_id
        shares = self.queue.shares
        if request in self.queue or (shares is not None and shares.is_shared):
            self._queue_changed()
        self.queue.ended(request_id)
        self._routing.forget(request_id)
        self._quarantine.forget(request_id)
        self._health.request_ended(request_id)
        self.locations.pop(request_id, None)

    def _queue_changed(self) -> None:
        """Has the next tick check whether waiting requests may begin, or preempted ones resume."""
        self._routing.is_stale = True
        for address in self._preempted_moves.givers:
            if address in self._idle:
                self._awake[address] = None

    def _deliver(self, events: StepEvents) -> None:
        """Forgets requests that ended with a step, and delivers its events to clients."""
        for request in events.acquitted:
            self._effects.append(RequestAcquitted(request, AcquittalReason.CAME_THROUGH))
        events.finished = [each for each in events.finished if not self._health.probe_ended(each)]
        for request in events.finished:
            self._forget(request)
        self._effects.append(DeliverTokens(events))

    def _deliver_ended(self, executor: ExecutorState) -> None:
        """Delivers requests that the engine ended by itself, if any, and charges tenants."""
        if executor.is_broken:
            return
        events = self._ask(executor, "take_ended", executor.engine.take_ended)
        if events is not None and events.any_ended:
            self.queue.charge(events.num_sampled)
            self._deliver(events)

    # -- executors -----------------------------------------------------------------------------

    def _join(self, event: ExecutorJoined) -> None:
        # Executors with equal configurations share one object, for which requests are prepared
        # once.
        alike = (each.config for each in self.executors.values() if each.config == event.config)
        config = next(alike, event.config)
        engine = Engine(config, self.queue, event.last_step_id)
        known = self.executors.get(event.address)
        if known is not None:
            self._remove(known, LossCause.DIED, "a new executor registered at this address")
        self.executors[event.address] = ExecutorState(
            event.address, event.epoch, config, engine, event.num_credits
        )

    def _serve(self, address: str) -> None:
        executor = self.executors.get(address)
        if executor is None:
            return
        self.capabilities.serves(executor.config)
        executor.is_withdrawn = executor.is_failing = self._health.is_withdrawn(executor.life)
        executor.is_connected = True
        self._effects.append(ExecutorServes(address))
        self._executor_takes_requests()
        self._wake(executor)

    def _executor_takes_requests(self) -> None:
        """Notes an executor that is new or takes requests again; ends unfitting requests."""
        self._health.executor_changed()
        self._routing.keep(self.taking_requests)
        if self.num_unfitting:
            self._end_unfitting()
        self._has_changed = True

    def _adapter_loaded(self, event: AdapterLoaded) -> None:
        executor = self.executors.get(event.address)
        if executor is None or executor.is_broken:
            return
        executor.engine.tick(self.now_ns)
        executor.engine.adapter_loaded(event.adapter, event.why_not)
        self._has_changed = True
        self._wake(executor)

    def _adapter_registered(self, adapter: str) -> None:
        executors = [
            each for each in self.taking_requests if each.engine.adapter_slots.loads_adapters
        ]
        if any(each.engine.has_adapter(adapter) for each in executors):
            return
        for executor in sorted(executors, key=lambda each: each.engine.adapter_slots.num_taken):
            executor.engine.tick(self.now_ns)
            if executor.engine.load_ahead(adapter):
                self._send_loads(executor)
                return

    def _send_loads(self, executor: ExecutorState) -> None:
        for load in executor.engine.adapter_slots.take_begun():
            self._effects.append(LoadAdapter(executor.address, load.adapter, load.kept))

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
        self._move_all(executor, executor.engine.preempted_request_ids)

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
            if request.request_id in self.locations:
                self._effects.append(RequestMoved(request, executor.address, MoveReason.DRAINED))
        self._take_back(executor, moved)
        self._has_changed = True

    def _remove(
        self, executor: ExecutorState, cause: LossCause, why: str, *, is_drained: bool = False
    ) -> None:
        """Removes an executor and closes its engine; its requests go on elsewhere."""
        del self.executors[executor.address]
        givers = self._preempted_moves.givers
        for others in (self._awake, self._idle, givers, self._draining, self._asks_at_ns):
            others.pop(executor.address, None)
        executor.is_connected = False
        self.capabilities.left(executor.config, self.now_ns)
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
        # Skips requests whose owners are gone.
        lost = [request for request in requests if self._runs_at(executor, request.request_id)]
        verdict = self._quarantine.executor_lost(lost, self._loss(executor, cause))
        self._announce(verdict)
        self._take_back(executor, lost)
        for request in verdict.released:
            self._push(request)
        for request in verdict.failed:
            if request.request_id in self.locations:
                self._end(request)  # a request recalled from the executor
        for place in [left for left in self.locations.values() if left.executor is executor]:
            # The engine is so broken that it neither gave the request back nor reported its end.
            if place.request.error is None:
                end_with_fault(place.request)
            self._end(place.request)
        self._has_changed = True

    def _end_unfitting(self) -> None:
        """Ends waiting requests that no executor, present or expected back, can run.

        Does nothing while no executor is connected: the abilities of executors to come are unknown.
        """
        if not any(executor.is_connected for executor in self.executors.values()):
            return
        for place in [each for each in self.locations.values() if each.executor is None]:
            try:
                self.capabilities.check_fits(place.request)
            except DomainError as error:
                within_s = self._config.executor_return_s
                message = f"{error.message}; no suitable executor came back within {within_s:g} s"
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
                continue  # the owner is gone
            self.locations[request.request_id] = RequestLocation(request)
            if request.is_finished:
                self._end(request)
            elif not self._quarantine.holds(request):
                self._push(request)

    def _runs_at(self, executor: ExecutorState, request_id: str) -> bool:
        place = self.locations.get(request_id)
        return place is not None and place.executor is executor

    def _announce(self, verdict: QuarantineDecision) -> None:
        self._effects += [RequestQuarantined(request) for request in verdict.isolated]
        self._effects += [RequestBlamed(request) for request in verdict.failed]
        for request in verdict.excused:
            self._effects.append(RequestAcquitted(request, AcquittalReason.ANOTHER_FAILED))

    # -- calls of engines ----------------------------------------------------------------------

    def _ask(
        self, executor: ExecutorState, name: str, call: Callable[[], _Result]
    ) -> _Result | None:
        """Calls the engine of an executor; None if that raised. The executor is removed then."""
        try:
            return self._call(executor, name, call)
        except _EngineBroke:
            return None

    def _call(self, executor: ExecutorState, name: str, call: Callable[[], _Result]) -> _Result:
        """Calls the sound engine of an executor. Raises ContractBroken, _EngineBroke."""
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
        """Withdraws and returns a request of an executor; None if the engine lacks it."""
        if executor.is_broken:
            return None
        moved = self._ask(executor, "withdraw", lambda: executor.engine.withdraw(request_id))
        self._deliver_ended(executor)
        self._wake(executor)
        return moved

    def _adopt(self, executor: ExecutorState, request: Request) -> None:
        """Gives an isolated request or a probe to an executor, to run in steps of its own."""
        self._ask(executor, "adopt", lambda: executor.engine.adopt(request))
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
            why = f"broke the step contract: {broken}"
            self._remove(executor, LossCause.DIED, why)
            return
        except _EngineBroke:
            return
        self._plan([event.address])
        self._deliver(events)
        self._deliver_ended(executor)

    def _step_progressed(self, event: StepProgressed) -> None:
        executor = self.executors.get(event.address)
        if executor is None or executor.is_broken:
            return
        engine = executor.engine
        try:
            events = self._call(executor, "take_part", lambda: engine.take_part(event.part))
        except ContractBroken as broken:
            self._remove(executor, LossCause.DIED, f"broke the step contract: {broken}")
            return
        except _EngineBroke:
            executor.has_lost_events = True
            return
        self.queue.charge(events.num_sampled)
        self._plan([event.address])
        if len(events.token_ids) or events.any_ended:
            self._deliver(events)
        self._deliver_ended(executor)

    def _judge(self, executor: ExecutorState, outcome: StepOutcome) -> None:
        """Judges a result, and takes back the requests to be tried on another executor.

        Raises ContractBroken, _EngineBroke.
        """
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
            self.locations[request.request_id] = RequestLocation(request)
            if not self._quarantine.holds(request):
                self._push(request)
        self._has_changed |= bool(moved)
        if executor.is_broken:
            raise _EngineBroke

    def _apply(self, executor: ExecutorState, outcome: StepOutcome) -> StepEvents:
        engine = executor.engine
        try:
            events = self._call(executor, "apply", lambda: engine.apply(outcome))
        except _EngineBroke:  # a result that breaks the contract changes nothing
            was_taken = engine.oldest_step_in_flight != outcome.step_id
            executor.has_lost_events = was_taken and outcome.status is StepStatus.OK
            raise
        executor.has_answered = True
        self.queue.charge(events.num_sampled)  # before planning the next step
        return events

    def _plan(self, addresses: Iterable[str]) -> None:
        """Plans steps of executors for their requests, and of idle ones for waiting requests."""
        executors = [self.executors[each] for each in addresses if each in self.executors]
        for executor in executors:
            self._idle[executor.address] = None
            self._routing.changed(executor)
        self._routing.begin_turn(self.taking_requests, self._idle_executors)
        if len(self.queue):
            self._move_preempted(executors)
        while True:
            for executor in executors:
                if not executor.is_broken:
                    self._plan_steps(executor)
                self._routing.planned(executor)
            self._move_preempted()
            executors = self._routing.choose(self._idle_executors)
            if not executors:
                break

    @property
    def _idle_executors(self) -> list[ExecutorState]:
        return [self.executors[address] for address in self._idle]

    def _plan_steps(self, executor: ExecutorState) -> None:
        """Sends steps to an executor while it has credits and something to compute."""
        engine, address = executor.engine, executor.address
        self._asks_at_ns.pop(address, None)
        self._idle.pop(address, None)
        while engine.num_in_flight < executor.num_credits:
            view = self._routing.view(executor)
            plan = self._ask(executor, "plan_step", partial(engine.plan_step, view))
            self._assign_begun(executor)
            if executor.is_broken:
                self._count_break(self._routing.looked_at)
                return
            self._send_loads(executor)
            executor.blockers = engine.placement.draft.blockers if plan is None else plan.blockers
            self._preempted_moves.planned(executor)
            if plan is None:
                self._idle[address] = None
                if engine.is_behind:
                    self._wake(executor)
                elif engine.ask_again_at_ns is not None and engine.num_in_flight == 0:
                    self._asks_at_ns[address] = engine.ask_again_at_ns
                break
            self._effects.append(SendStep(address, plan))
        self._deliver_ended(executor)

    def _count_break(self, looked_at: Request | None) -> None:
        """Ends the request that a broken engine looked at last, if too many engines broke so.

        The request waits in the queue. It may be what breaks engines, and would go on to the next
        one.
        """
        if looked_at is not None and looked_at in self.queue and saw_too_many_break(looked_at):
            end_with_fault(looked_at)
            self._end(looked_at)

    def _move_preempted(self, planning: Sequence[ExecutorState] = ()) -> None:
        """Moves to the queue one preempted request that should rather begin at another executor."""
        moves = self._preempted_moves
        if not moves.givers:
            moves.next_at_ns = None
            return
        found = moves.choose(self.taking_requests, self.now_ns, planning)
        if found is not None:
            giver, request = found
            self._take_from(giver, request.request_id, MoveReason.BEGINS_SOONER_ELSEWHERE)

    def _assign_begun(self, executor: ExecutorState) -> None:
        """Assigns requests that began in the latest step to their executor."""
        begun = self.queue.take_begun()
        if begun:
            self._queue_changed()
        for request in begun:
            assignment = self._routing.assignment(request, executor)
            if self._health.has_failed(request):
                assignment = replace(assignment, why=AssignedFor.RETRIED)
            self._routing.forget(request.request_id)
            self.locations[request.request_id].executor = executor
            self._effects.append(RequestAssigned(request, executor.address, assignment))

    def _wake(self, executor: ExecutorState) -> None:
        """Has the next tick plan steps of an executor, after all events that arrived together."""
        self._awake[executor.address] = None

    def _tick(self, *, looks_everywhere: bool) -> None:
        self._wakes_at_ns = None
        self._end_overdue()
        if self.capabilities.give_up(self.now_ns):
            self._end_unfitting()
        next_probe_ns = self._health.next_probe_ns
        self._health.is_due |= next_probe_ns is not None and next_probe_ns <= self.now_ns
        self._place_isolated()
        awake, self._awake = self._awake, {}
        self._routing.end_holds()
        for address, at_ns in self._asks_at_ns.items():
            if at_ns <= self.now_ns:
                awake[address] = None
        moves = self._preempted_moves
        if moves.next_at_ns is not None and moves.next_at_ns <= self.now_ns:
            moves.next_at_ns = None
            awake |= dict.fromkeys(moves.givers)
        self._plan(list(self.executors) if looks_everywhere else awake)

    def _end_overdue(self) -> None:
        """Ends some of the waiting and quarantined requests whose deadline is past."""
        for _ in range(MAX_OVERDUE):
            request = self.queue.overdue()
            if request is None:
                break
            end_overdue(request, self.now_ns)
            self._end(request)
        for request in self._quarantine.take_overdue(self.now_ns):
            self._end(request)

    # -- follow-up work, before `handle` returns -----------------------------------------------

    def _settle(self) -> None:
        """Completes work that event handlers left: removals, health actions, drains, wake."""
        while True:
            if self._broken:
                executor = self._broken.pop()
                if self.executors.get(executor.address) is executor:
                    why = "the scheduler's engine for this executor failed"
                    self._remove(executor, LossCause.BLAMELESS, why)
            elif self._health.is_due:
                self._act_on_health()
            elif self._has_changed:
                self._has_changed = False
                self._place_isolated()
                if self._quarantine.num_waiting and not self._quarantine.is_holding:
                    # A request still waiting here has outgrown all executors; otherwise one would
                    # have it by now.
                    self._end_unfitting()
                self._queue_changed()
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
        if self.is_about_to_plan:
            return 0
        looks = [self.queue.next_deadline_ns, self._quarantine.next_look_ns]
        looks += [self._health.next_probe_ns, self._routing.next_hold_end_ns]
        looks.append(self.capabilities.next_give_up_ns)
        times = [at_ns + _PAST_NS if at_ns else at_ns for at_ns in looks if at_ns is not None]
        times += self._asks_at_ns.values()
        if self._preempted_moves.next_at_ns is not None:
            times.append(self._preempted_moves.next_at_ns)
        return min(times, default=None)

    def _act_on_health(self) -> None:
        for action in self._health.act(self.now_ns):
            executor = action.executor
            match action:
                case WithdrawExecutor():
                    if self.executors.get(executor.address) is executor:
                        self._remove(executor, LossCause.WITHDRAWN, action.why)
                case Probe():
                    if not executor.is_broken:
                        self._adopt(executor, action.request)
                case HealthChanged():
                    change = ExecutorHealthChanged(executor.address, action.change)
                    self._effects.append(change)
                    if action.change is not HealthChange.PROBE_FAILED:
                        self._executor_takes_requests()
                case _:
                    assert_never(action)

    # -- placement of isolated and withdrawn requests ------------------------------------------

    def _place_isolated(self) -> None:
        """Gives isolated requests to an executor that runs them alone.

        Recalls them from the last executor while others may come back.
        """
        by_engine: dict[Engine, ExecutorState] = {e.engine: e for e in self.taking_requests}
        for request_id, host in self._quarantine.to_recall(list(by_engine), self.now_ns):
            self._take_from(by_engine[host], request_id, MoveReason.LAST_EXECUTOR)
        isolated = self._quarantine.dispatch(
            list(by_engine),
            self.now_ns,
            lambda request, host: self._health.avoids(request, by_engine[host]),
        )
        for request, host in isolated:
            executor = by_engine[host]
            self.locations[request.request_id].executor = executor
            self._effects.append(RequestAssigned(request, executor.address, _ALONE))
            if not executor.is_broken:
                self._adopt(executor, request)
            if executor.is_broken:  # `_settle` takes the request back and comes here again
                break

    def _take_from(self, executor: ExecutorState, request_id: str, reason: MoveReason) -> None:
        """Takes a request back from an executor, so that it begins elsewhere."""
        moved = self._withdraw(executor, request_id)
        if moved is None:
            return
        self.locations[request_id] = RequestLocation(moved)
        self._effects.append(RequestMoved(moved, executor.address, reason))
        if reason is MoveReason.LAST_EXECUTOR:
            self._quarantine.recalled(moved)
        else:
            self._push(moved)
