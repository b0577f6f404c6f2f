"""Which executor has which request, which waits for one, and who moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from scheduler_service.assignment import AssignedFor, Assignment
from scheduler_service.audit.audit import Audit
from scheduler_service.audit.events import RequestQuarantined
from scheduler_service.callers.admission import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import QUEUE_FULL_RETRY_S
from scheduler_service.executors.broken_core import end_with_fault
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.fleet.executor_losses import Loss, LossCause
from scheduler_service.fleet.fleet_queue import FleetQueue, Given
from scheduler_service.fleet.host_state import Host
from scheduler_service.fleet.moves import has_waited, to_be_moved
from scheduler_service.fleet.quarantine import Quarantine, Verdict
from scheduler_service.observer import AcquittedBy, Head, Observer, TakenBack
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.log_context import LogContext, logging_about

# By then the clock is past that time.
_PAST_TIME_S = 0.001
# Whoever watches the first that wait is told so often at most.
_BETWEEN_LOOKS_NS = 100_000_000
_ALONE = Assignment(AssignedFor.TRIED_ALONE)
_RETRY = Assignment(AssignedFor.RETRIED)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tracked:
    """An unfinished request, its terms, and who runs it (None: nobody yet)."""

    request: Request
    admission: Admission
    submitted_ns: int
    engine: EngineLoop | None = None


@dataclass(frozen=True, slots=True)
class DispatcherOwner:
    """`taking_requests`: engines that may be given some. `end`: tells that one has ended.

    That is called for a request that no engine has, or that the last one could not give back.
    `known`: all engines. `avoids`: whether a request should be retried on another than this one.
    """

    taking_requests: Callable[[], list[EngineLoop]]
    end: Callable[[Request], None]
    known: Callable[[], list[EngineLoop]]
    avoids: Callable[[Request, EngineLoop], bool]


class Dispatcher:
    """Has every unfinished request in one place: at an engine, in the queue, or in quarantine.

    `tracked`: all of them, by id.
    """

    def __init__(
        self,
        config: ClusterConfig,
        now_ns: Callable[[], int],
        audit: Audit,
        owner: DispatcherOwner,
        observer: Observer,
    ) -> None:
        self._max_num_waiting = config.max_num_waiting
        self._now_ns = now_ns
        self._audit = audit
        self._owner = owner
        self._observer = observer
        self._next_heads_ns = 0
        self.tracked: dict[str, Tracked] = {}
        self._queue = FleetQueue(config.policies.queue_policy, config.policies.tenant_weights)
        self._quarantine = Quarantine(
            config.max_executor_losses, refuses_late=self._queue.refuses_late
        )
        # Requests that failed on an executor, and go to another before all who wait.
        self._retries: dict[str, Request] = {}
        # When somebody who waits is to be looked at.
        self._looks_at_ns: int | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Requests no executor has."""
        return len(self._queue) + len(self._retries) + self._quarantine.num_waiting

    @property
    def num_quarantined(self) -> int:
        """Of these, those that executors may have died of."""
        return self._quarantine.num_waiting

    def first_waiting(self, limit: int) -> list[Request]:
        """Those of the queue whose turn is next, to be looked at."""
        return self._queue.first(self._now_ns(), limit)

    def num_unfitting(self, engines: Collection[EngineLoop]) -> int:
        """How many of these none of `engines`, which are all that take requests, could ever run."""
        cores = [engine.scheduler for engine in engines]
        # Who waits in quarantine begins at once wherever it fits, or waits for another executor.
        num_isolated = 0 if self._quarantine.is_holding else self._quarantine.num_waiting
        return self._queue.num_unfitting(cores) + num_isolated

    def has_work(self, engines: Collection[EngineLoop]) -> bool:
        """Whether one of `engines` has a request, or could run one that waits."""
        cores = [engine.scheduler for engine in engines]
        has_requests = any(core.num_unfinished for core in cores)
        return has_requests or bool(self._retries) or self._queue.any_fits(cores)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants other shares of what waits."""
        self._queue.weigh_tenants(weights)

    def charge(self, num_sampled: Mapping[str, int]) -> None:
        """Tenants got so many output tokens."""
        self._queue.charge(num_sampled)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    # -- requests ------------------------------------------------------------------------------

    def check_place(self, request: Request, num_executors: int) -> None:
        """Raises DomainError(QUEUE_FULL) if too many wait."""
        num_places = self._max_num_waiting * max(1, num_executors)
        if not self._queue.has_place(request, num_places):
            message = f"{len(self._queue)} requests wait; allowed: {num_places}"
            if len(self._queue) < num_places:
                message += ", of which some are left to tenants that have fewer"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=QUEUE_FULL_RETRY_S)

    def take(self, request: Request, admission: Admission) -> None:
        """A new request, which has been checked, waits or begins."""
        request.submitted_ns = now_ns = self._now_ns()
        self.tracked[request.request_id] = Tracked(request, admission, now_ns)
        self._queue.push(request)
        self._dispatch([])

    def forget(self, request_id: str) -> Tracked | None:
        """A request has ended, wherever it was; what was known of it."""
        self._queue.forget(request_id)
        self._retries.pop(request_id, None)
        self._quarantine.forget(request_id)
        return self.tracked.pop(request_id, None)

    # -- executors -----------------------------------------------------------------------------

    def look_again(self) -> None:
        """One more takes requests, or anything else may have changed, anywhere."""
        self._dispatch()

    def engine_lost(self, engine: EngineLoop, requests: list[Request], cause: LossCause) -> None:
        """Takes back what a closed engine gave away."""
        # The owners of others are gone.
        lost = [request for request in requests if self._runs_at(engine, request.request_id)]
        verdict = self._quarantine.executor_lost(lost, self._loss(engine, cause))
        self._tell(verdict)
        self._take_back(engine, lost)
        for request in verdict.released:
            self._queue.push(request)
        for tracked in [left for left in self.tracked.values() if left.engine is engine]:
            # A core so broken that it could not even give this one back.
            end_with_fault(tracked.request)
            self._owner.end(tracked.request)
        self._dispatch()

    def engine_gave_back(self, engine: EngineLoop, requests: list[Request]) -> None:
        """Takes back what an engine that drains gave away."""
        self._quarantine.executor_lost(requests, self._loss(engine, LossCause.BLAMELESS))
        for request in requests:
            if self._runs_at(engine, request.request_id):
                self._observer.request_taken_back(request, engine.life[0], TakenBack.DRAINED)
        self._take_back(engine, requests)
        self._dispatch()

    def retry_elsewhere(self, engine: EngineLoop, requests: list[Request]) -> None:
        """Moves requests that failed on one executor to another one."""
        requests = [each for each in requests if self._runs_at(engine, each.request_id)]
        self._quarantine.executor_lost(requests, self._loss(engine, LossCause.WITHDRAWN))
        for request in requests:
            self._observer.request_taken_back(request, engine.life[0], TakenBack.FAILED_THERE)
            tracked = self.tracked[request.request_id]
            tracked.request, tracked.engine = request, None
            if not self._quarantine.holds(request):
                self._retries[request.request_id] = request
        # Not now: the core that gave them away is about to learn from a result.
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _loss(self, engine: EngineLoop, cause: LossCause) -> Loss:
        num_living = len(self._owner.taking_requests()) + 1
        return Loss(cause, engine.life, self._now_ns(), engine.has_answered, num_living)

    def _take_back(self, engine: EngineLoop, requests: list[Request]) -> None:
        for request in sorted(requests, key=lambda moved: moved.arrival):
            if not self._runs_at(engine, request.request_id):
                continue  # its owner is gone
            tracked = self.tracked[request.request_id]
            tracked.request, tracked.engine = request, None
            if request.is_finished:
                self._owner.end(request)
            elif not self._quarantine.holds(request):
                self._queue.push(request)

    def _runs_at(self, engine: EngineLoop, request_id: str) -> bool:
        tracked = self.tracked.get(request_id)
        return tracked is not None and tracked.engine is engine

    def _tell(self, verdict: Verdict) -> None:
        """Operators learn whom executors died of; `RequestEnded` tells the audit log of an end."""
        for request in verdict.isolated:
            context = self._log_context(request)
            with logging_about(context):
                _log.warning("request_quarantined num_trials=%d", request.num_trials_left)
            self._audit.record(RequestQuarantined(request.scheduling.tenant, context.request_id))
            self._observer.request_quarantined(request)
        for request in verdict.failed:
            with logging_about(self._log_context(request)):
                _log.error("request_kills_executors why=%r", request.error)
        self.tell_acquitted(verdict.excused, AcquittedBy.ANOTHER_FAILED)

    def tell_acquitted(self, requests: Iterable[Request], why: AcquittedBy) -> None:
        """Operators learn who is not tried alone any more."""
        for request in requests:
            with logging_about(self._log_context(request)):
                _log.info("request_acquitted why=%s", why.value)
            self._observer.request_acquitted(request, why)

    def _log_context(self, request: Request) -> LogContext:
        admission = self.tracked[request.request_id].admission
        return LogContext(admission.name.own_id, admission.trace_id)

    def refill(self, engine: EngineLoop) -> None:
        """An executor plans a step: it may begin what waits."""
        if not engine.takes_requests:
            return
        if len(self._queue):
            self._dispatch([engine])
            return
        self._queue.note(engine.scheduler)
        openings = engine.scheduler.openings
        now_ns = self._now_ns()
        if openings.nobody_waits:
            # Mostly nobody waits anywhere, and whether one could begin here needs no answer.
            engines = self._owner.taking_requests()
            givers = [each for each in engines if has_waited(each.scheduler, now_ns)]
            if givers and openings.is_open:
                self._move_one([engine], givers)
        elif has_waited(engine.scheduler, now_ns):
            idle = [e for e in self._owner.taking_requests() if not e.scheduler.num_unfinished]
            self._move_one(idle, [engine])

    def _move_one(self, takers: Sequence[EngineLoop], givers: Sequence[EngineLoop]) -> None:
        """Some executor has nobody to begin: perhaps somebody waits at another."""
        engines: dict[Host, EngineLoop] = {engine.scheduler: engine for engine in givers}
        for taker in takers:
            found = to_be_moved(self._now_ns(), taker.scheduler, engines)
            if found is not None:
                host, request_id = found
                self._withdraw(engines[host], request_id)
                self._dispatch([taker, engines[host]])
                return

    def _withdraw(self, engine: EngineLoop, request_id: str) -> None:
        with suppress(ExecutorLost):  # it gives all of its requests back
            moved = engine.withdraw(request_id)
            if moved is not None:
                tracked = self.tracked[request_id]
                tracked.request, tracked.engine = moved, None
                self._observer.request_taken_back(
                    moved, engine.life[0], TakenBack.BEGINS_SOONER_ELSEWHERE
                )
                self._queue.push(moved)

    def _recall(self, engine: EngineLoop, request_id: str) -> None:
        """An isolated request is not to be tried on the last executor."""
        with suppress(ExecutorLost):  # it gives all of its requests back
            moved = engine.withdraw(request_id)
            if moved is not None:
                tracked = self.tracked[request_id]
                tracked.request, tracked.engine = moved, None
                self._observer.request_taken_back(moved, engine.life[0], TakenBack.LAST_EXECUTOR)
                self._quarantine.recalled(moved)

    def _dispatch(self, changed: Collection[EngineLoop] | None = None) -> None:
        """Gives requests to executors that can begin them; `changed`: of these, None for all."""
        engines: dict[Host, EngineLoop] = {
            engine.scheduler: engine for engine in self._owner.taking_requests()
        }
        changed_hosts: list[Host] | None = None
        if changed is not None:
            changed_hosts = [engine.scheduler for engine in changed if engine.takes_requests]
        now_ns = self._now_ns()
        for request_id, host in self._quarantine.to_recall(list(engines), now_ns):
            self._recall(engines[host], request_id)
        isolated = self._quarantine.dispatch(
            list(engines), now_ns, lambda request, host: self._owner.avoids(request, engines[host])
        )
        retried = self._dispatch_retries(engines)
        given = self._queue.dispatch(
            now_ns,
            engines.keys(),
            changed_hosts,
            lambda host, request_id: self._withdraw(engines[host], request_id),
        )
        alone = (Given(request, host, _ALONE) for request, host in isolated)
        for request, host, assignment in chain(retried, alone, given):
            engine = self.tracked[request.request_id].engine = engines[host]
            self._observer.request_given(request, engine.life[0], assignment)
            try:
                engine.readmit(request)
            except ExecutorLost:  # it gives the request back, and then there is more to do
                break
        self._plan_look()
        if len(self._queue) and self._observer.watches_heads:
            self._tell_heads(engines, is_due=changed is None)

    def _dispatch_retries(self, engines: Mapping[Host, EngineLoop]) -> Iterator[Given]:
        """Places retries on the least busy executor where they did not fail, if there is one.

        While all such are slow to answer, retries wait for them.
        """
        for request in list(self._retries.values()):
            fitting = [engine for engine in self._owner.known() if engine.scheduler.fits(request)]
            others = [e for e in fitting if e.is_serving and not self._owner.avoids(request, e)]
            hosts = [e.scheduler for e in others or fitting if e.scheduler in engines]
            if hosts and self._retries.pop(request.request_id, None) is not None:
                yield Given(
                    request, min(hosts, key=lambda host: host.num_unfinished_tokens), _RETRY
                )

    def heads(self) -> list[Head]:
        """The first who wait for an executor, and what keeps them from each."""
        engines: dict[Host, EngineLoop] = {
            engine.scheduler: engine for engine in self._owner.taking_requests()
        }
        return self._heads(engines)

    def _heads(self, engines: Mapping[Host, EngineLoop]) -> list[Head]:
        return [
            Head(request, tuple((engines[host].life[0], why.value) for host, why in hindrances))
            for request, hindrances in self._queue.heads(self._now_ns(), engines.keys())
        ]

    def _tell_heads(self, engines: Mapping[Host, EngineLoop], *, is_due: bool) -> None:
        now_ns = self._now_ns()
        if is_due or now_ns >= self._next_heads_ns:
            self._next_heads_ns = now_ns + _BETWEEN_LOOKS_NS
            self._observer.heads_wait(self._heads(engines))

    def _plan_look(self) -> None:
        """Sees to it that whoever waits is looked at when its time has come."""
        times = (self._queue.next_look_ns, self._quarantine.next_look_ns)
        at_ns = min((each for each in times if each is not None), default=None)
        if at_ns == self._looks_at_ns:
            return
        self._looks_at_ns = at_ns
        if self._alarm is not None:
            self._alarm.cancel()
        if at_ns is not None:
            delay_s = max(at_ns - self._now_ns(), 0) / 1e9 + _PAST_TIME_S
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """A deadline is past, or somebody has waited long enough for a busy executor."""
        self._looks_at_ns = None
        now_ns = self._now_ns()
        for waiting in (self._queue, self._quarantine):
            for request in waiting.take_overdue(now_ns):
                self._owner.end(request)
        self._dispatch([])
