"""All requests: who runs them, and how they outlive the executors they run on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from scheduler_service.audit.audit import Audit, NoAudit
from scheduler_service.callers.admission import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Request
from scheduler_service.dispatcher import Dispatcher, DispatcherOwner, Tracked
from scheduler_service.executors.drains import Drained
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.engine_parts import EngineOwner, EngineParts
from scheduler_service.executors.engines import Engines
from scheduler_service.executors.executor_health import ExecutorHealth, HealthOwner
from scheduler_service.executors.executor_link import ExecutorLink, ExecutorLost, Link, LinkConfig
from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.journal.journal import Journal, NoJournal
from scheduler_service.observer import AcquittedBy, Head, NoObserver, Observer, TakenBack
from scheduler_service.request_names import RequestName
from scheduler_service.served import Served
from scheduler_service.streams.delivery import Delivery
from scheduler_service.streams.outbox import Unread
from scheduler_service.streams.sinks import Sink, Stream
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

# All streams together may hold as much unread as so many may alone.
_NUM_UNREAD_STREAMS = 16

_log = logging.getLogger(__name__)


class Cluster:
    """Routes requests to executors; a request outlives the executors it runs on."""

    def __init__(
        self,
        config: ClusterConfig,
        scheduler_epoch: int,
        on_change: Callable[[], None],
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        journal: Journal | NoJournal | None = None,
        audit: Audit | None = None,
        observer: Observer | None = None,
        connect: Callable[[executor.ExecutorInfo, LinkConfig], Link] = ExecutorLink,
    ) -> None:
        self._config = config
        self.scheduler_epoch = scheduler_epoch
        self._on_change = on_change
        self._last_arrival = 0
        max_unread_bytes = config.max_unread_bytes
        unread = Unread(max_unread_bytes, _NUM_UNREAD_STREAMS * max_unread_bytes)
        self.delivery = Delivery(unread, self._end_unread)
        self.now_ns = now_ns
        self._draining: DomainError | None = None
        self._idle = asyncio.Event()
        audit = audit or NoAudit()
        self.observer = observer = observer or NoObserver()
        self._health = ExecutorHealth(
            now_ns,
            HealthOwner(
                lambda: self._engines.known,
                lambda engine, why: self._engines.withdraw(engine, why),
                lambda engine, requests: self._dispatcher.retry_elsewhere(engine, requests),
                self._engine_joined,
            ),
        )
        owner = DispatcherOwner(
            lambda: self._engines.taking_requests,
            self._end,
            lambda: self._engines.known,
            self._health.avoids,
        )
        self._dispatcher = Dispatcher(config, now_ns, audit, owner, observer)
        self._tracked = self._dispatcher.tracked
        self._engines = Engines(
            EngineParts(
                config, scheduler_epoch, now_ns, journal or NoJournal(), audit, observer, connect
            ),
            EngineOwner(
                self._deliver,
                self._dispatcher.refill,
                self._end_unfitting,
                self._engine_joined,
                self._engine_lost,
                self._engine_gave_back,
                self._health.judge,
                self._health.is_withdrawn,
            ),
        )
        self.served = Served(self._engines, config.max_model_len)

    # -- executors -----------------------------------------------------------------------------

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants other shares, under the policy `fair`.

        What waits is divided anew at once, rows and blocks by executors that join from now on.
        """
        self._dispatcher.weigh_tenants(weights)
        self._engines.weigh_tenants(weights)

    @property
    def engines(self) -> list[EngineLoop]:
        """The executors that answered, in order of registration."""
        return self._engines.known

    @property
    def num_steps_answered(self) -> int:
        """By all executors that ever were here."""
        return self._engines.num_steps_answered

    @property
    def step_allowed_s(self) -> float:
        """How long it may be until some step is answered, if there is something to do."""
        return self._engines.step_allowed_s

    @property
    def is_draining(self) -> bool:
        """Whether it takes no more requests."""
        return self._draining is not None

    @property
    def num_unassigned(self) -> int:
        """Requests no executor has."""
        return self._dispatcher.num_waiting

    @property
    def num_unfitting(self) -> int:
        """Of these, those that none that takes requests could ever run."""
        return self._dispatcher.num_unfitting(self._engines.taking_requests)

    def heads(self) -> list[Head]:
        """The first that no executor has, and what keeps them from each."""
        return self._dispatcher.heads()

    def name_of(self, request: Request) -> str:
        """What its client calls an unfinished one."""
        return self._tracked[request.request_id].admission.name.own_id

    @property
    def num_quarantined(self) -> int:
        """Requests no executor has, and of which executors may have died."""
        return self._dispatcher.num_quarantined

    def first_waiting(self, limit: int) -> list[Request]:
        """Of those that no executor has, whose turn is next, to be looked at."""
        return self._dispatcher.first_waiting(limit)

    def tracked(self, request_id: str) -> Tracked | None:
        """What is known of an unfinished request, to be looked at."""
        return self._tracked.get(request_id)

    @property
    def has_work(self) -> bool:
        """Whether some executor that is here has a request, or could run one that waits."""
        return self._dispatcher.has_work([e for e in self.engines if e.is_connected])

    @property
    def is_computing(self) -> bool:
        """Whether a step of any executor is not answered."""
        return not all(engine.steps.watch.is_idle for engine in self.engines)

    def look_again(self) -> None:
        """Sees who of those that wait could begin, as if everything had changed."""
        self._health.joined()
        self._dispatcher.look_again()
        for engine in self.engines:
            engine.wake_up()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._tracked)

    async def join(self, info: executor.ExecutorInfo, target: str | None = None) -> None:
        """Takes an executor that registers, once it has answered. Raises DomainError."""
        self.check_not_draining()
        await self._engines.join(info, target)

    async def drain_executor(self, address: str, timeout_s: float) -> Drained:
        """Sends an executor away; returns when it is gone. Raises DomainError."""
        return await self._engines.drain(address, timeout_s)

    def undrain_executor(self, address: str) -> None:
        """Takes an executor back that was sent away. Raises DomainError."""
        self._engines.undrain(address)

    async def leave(self, address: str, executor_epoch: int, timeout_s: float) -> None:
        """An executor wants to go; returns when it may. Raises DomainError."""
        await self._engines.leave(address, executor_epoch, timeout_s)

    def _engine_joined(self) -> None:
        self._on_change()
        self._health.joined()
        if self.num_unfitting:
            self._end_unfitting()
        self._dispatcher.look_again()

    def _end_unfitting(self) -> None:
        """Ends waiting requests that no executor can run which is here or expected back.

        While no executor is connected, nobody knows what those to come can run.
        """
        if not any(engine.is_connected for engine in self.engines):
            return
        for waiting in [each for each in self._tracked.values() if each.engine is None]:
            try:
                self._engines.check(waiting.request)
            except DomainError as error:
                within_s = self._config.executor_return_s
                message = f"{error.message}; none that could came back within {within_s:g} s"
                waiting.request.fail_unscheduled(error.reason, message)
                self._end(waiting.request)

    def _engine_lost(self, engine: EngineLoop, requests: list[Request], cause: LossCause) -> None:
        self._on_change()
        self._health.gone(engine)
        address = engine.link.info.address
        if cause is LossCause.WITHDRAWN:
            for request in requests:
                self.observer.request_taken_back(request, address, TakenBack.WITHDRAWN)
            self.observer.executor_gone(address, (), is_lost=False)
        else:
            is_lost = cause is not LossCause.BLAMELESS
            self.observer.executor_gone(address, requests, is_lost=is_lost)
        self._dispatcher.engine_lost(engine, requests, cause)

    def _engine_gave_back(self, engine: EngineLoop, requests: list[Request]) -> None:
        self._on_change()
        self._dispatcher.engine_gave_back(engine, requests)

    # -- streams of clients ----------------------------------------------------------------------

    @contextmanager
    def client_stream(self, stream: Stream) -> Iterator[None]:
        """A stream is open within; whatever ends that, it ends its requests."""
        self.delivery.open_stream(stream)
        try:
            yield
        finally:
            stream.outbox.close()
            self._end_requests(stream)
            self.delivery.close_stream(stream)

    def fail_stream(self, stream: Stream, error: DomainError) -> None:
        """Ends a stream with `error`, after what is queued, and its requests at once."""
        stream.outbox.end(error)
        self._end_requests(stream)

    def _end_unread(self, stream: Stream) -> None:
        num_bytes = stream.outbox.num_bytes
        _log.info("stream_not_read number=%d num_bytes=%d", stream.number, num_bytes)
        error = DomainError(
            "STREAM_NOT_READ",
            f"the stream held {num_bytes} bytes that were not read; allowed: "
            f"{self._config.max_unread_bytes}, and {_NUM_UNREAD_STREAMS} times that in all streams",
        )
        stream.outbox.close(error)
        # Not now: a core is still telling what a step brought.
        asyncio.get_running_loop().call_soon(self._end_requests, stream)

    def _end_requests(self, stream: Stream) -> None:
        for request_id in self.delivery.requests_of(stream):
            self._abandon(request_id)

    # -- requests ------------------------------------------------------------------------------

    def next_arrival(self) -> int:
        """A number larger than any before."""
        self._last_arrival += 1
        return self._last_arrival

    def check_not_draining(self) -> None:
        """Raises DomainError(DRAINING)."""
        if self._draining is not None:
            raise _draining(self._draining.schedulers)

    def check_accepting(self) -> None:
        """Raises DomainError DRAINING or MODEL_NOT_READY."""
        self.check_not_draining()
        if self._engines.config is None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")

    def submit(self, request: Request, sink: Sink, admission: Admission) -> None:
        """Takes a request. Raises DomainError; then nothing has changed.

        While no executor is connected, requests wait for one, up to the queue's bound.
        """
        assert request.request_id == admission.name.key
        self.check_accepting()
        if request.request_id in self._tracked:
            raise DomainError(
                "REQUEST_ID_IN_USE", f"request_id {admission.name.own_id!r} is unfinished"
            )
        self._engines.check(request)
        self._dispatcher.check_place(request, len(self._engines.taking_requests))
        self.delivery.expect(request.request_id, sink)
        admission.charge.begin()
        self.observer.request_submitted(request, admission.name, self.num_unassigned)
        self._dispatcher.take(request, admission)

    def abort(self, name: RequestName) -> None:
        """Ends a request. Raises DomainError(REQUEST_UNKNOWN)."""
        tracked = self._tracked.get(name.key)
        if tracked is None:
            raise DomainError("REQUEST_UNKNOWN", f"no unfinished request {name.own_id!r}")
        if tracked.engine is not None:
            with suppress(ExecutorLost):
                tracked.engine.abort(name.key)
                return
        tracked.request.abort_unscheduled()
        self._end(tracked.request)

    def _abandon(self, request_id: str) -> None:
        """The client is gone: ends the request if it is unfinished, and tells nobody."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        self.delivery.forget(request_id)
        try:
            if tracked.engine is not None:
                with suppress(ExecutorLost):
                    tracked.engine.abort(request_id)
        finally:  # after it has told what tokens there were
            self._untrack(request_id)

    async def drain(self, timeout_s: float, peers: tuple[str, ...] = ()) -> None:
        """Refuses new requests, lets those here finish for `timeout_s`, then ends the rest.

        `peers`: schedulers that may take over. Then what waits ends at once: nothing of it has been
        computed here. What runs would have to be computed again, and may be over before that.
        """
        self._draining = _draining(peers)
        if peers:
            self._end_waiting()
        if self._tracked:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        for stream in list(self.delivery.streams.values()):
            self.fail_stream(stream, _draining(peers))
        for request_id in list(self._tracked):
            self._abandon(request_id)
        self._dispatcher.close()
        self._health.close()
        await self._engines.close()

    def _end_waiting(self) -> None:
        """Ends streams of which no request runs."""
        for stream in list(self.delivery.streams.values()):
            tracked = [self._tracked.get(name) for name in self.delivery.requests_of(stream)]
            if tracked and all(each is not None and each.engine is None for each in tracked):
                self.fail_stream(stream, self._draining or _draining())

    def _deliver(self, events: StepEvents) -> None:
        self.delivery.deliver(events)
        self.observer.tokens_delivered(events)
        self._dispatcher.tell_acquitted(events.acquitted, AcquittedBy.CAME_THROUGH)
        self._dispatcher.charge(events.num_sampled)
        for request in events.finished:
            if not self._health.probe_ended(request):
                self._untrack(request.request_id)

    def _end(self, request: Request) -> None:
        self.delivery.finish(request)
        self._untrack(request.request_id)

    def _untrack(self, request_id: str) -> None:
        """The one way out for a request that was taken."""
        tracked = self._dispatcher.forget(request_id)
        self._health.request_ended(request_id)
        self.delivery.forget(request_id)
        if tracked is not None and tracked.engine is not None:
            self._engines.request_ended(tracked.engine)
        if not self._tracked:
            self._idle.set()
        if tracked is not None:
            self.observer.request_ended(tracked.request)
            tracked.admission.charge.end(tracked.request)


def _draining(peers: tuple[str, ...] = ()) -> DomainError:
    return DomainError("DRAINING", "the scheduler is shutting down", schedulers=peers)
