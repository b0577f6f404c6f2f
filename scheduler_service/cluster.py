"""All requests: who runs them, and how they outlive the executors they run on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain

from scheduler_service.audit.audit import Audit, NoAudit
from scheduler_service.audit.events import RequestQuarantined
from scheduler_service.callers.admission import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.planning.arrival_checks import check_request
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import MAX_SEQUENCES
from scheduler_service.core.scheduler import QUEUE_FULL_RETRY_S
from scheduler_service.executors.broken_core import end_with_fault
from scheduler_service.executors.drains import Drained
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.engines import EngineOwner, EngineParts, Engines
from scheduler_service.executors.executor_link import ExecutorLink, ExecutorLost, Link, LinkConfig
from scheduler_service.fleet.executor_losses import Loss, LossCause
from scheduler_service.fleet.fleet_queue import FleetQueue
from scheduler_service.fleet.host_state import Host
from scheduler_service.fleet.quarantine import Quarantine, Verdict
from scheduler_service.journal.journal import Journal, NoJournal
from scheduler_service.request_limits import message_bytes, most_message_bytes
from scheduler_service.request_names import RequestName
from scheduler_service.streams.delivery import Delivery
from scheduler_service.streams.outbox import Unread
from scheduler_service.streams.sinks import Sink, Stream
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

# All streams together may hold as much unread as so many may alone.
_NUM_UNREAD_STREAMS = 16
# By then the clock is past a deadline.
_PAST_DEADLINE_S = 0.001

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """An unfinished request, its terms, and who runs it (None: nobody yet)."""

    request: Request
    admission: Admission
    engine: EngineLoop | None = None


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
        connect: Callable[[executor.ExecutorInfo, LinkConfig], Link] = ExecutorLink,
    ) -> None:
        self._config = config
        self.scheduler_epoch = scheduler_epoch
        self._on_change = on_change
        self._tracked: dict[str, _Tracked] = {}
        self._queue = FleetQueue(config.policies.queue_policy, config.policies.tenant_weights)
        # Of a deadline of somebody who waits.
        self._awaited_ns: int | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._last_arrival = 0
        max_unread_bytes = config.max_unread_bytes
        unread = Unread(max_unread_bytes, _NUM_UNREAD_STREAMS * max_unread_bytes)
        self.delivery = Delivery(unread, self._end_unread)
        self.now_ns = now_ns
        self._quarantine = Quarantine(config.max_executor_losses)
        self._draining: DomainError | None = None
        self._idle = asyncio.Event()
        self._audit = audit or NoAudit()
        self._engines = Engines(
            EngineParts(
                config, scheduler_epoch, now_ns, journal or NoJournal(), self._audit, connect
            ),
            EngineOwner(
                self._deliver,
                self._refill,
                self._engine_joined,
                self._engine_lost,
                self._engine_gave_back,
            ),
        )

    # -- executors -----------------------------------------------------------------------------

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Gives tenants other shares, under the policy `fair`.

        What waits is divided anew at once, rows and blocks by executors that join from now on.
        """
        self._queue.weigh_tenants(weights)
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
    def model(self) -> executor.ModelInfo | None:
        """What the executors serve; None before one was connected."""
        return self._engines.model

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer of the model."""
        return self._engines.tokenizer_files

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together, as some connected executor allows."""
        config = self.largest_config
        return config.max_len if config is not None else 0

    @property
    def max_num_sequences(self) -> int:
        """Most sequences of a request, as some connected executor allows."""
        return min(self._engines.max_num_seqs, MAX_SEQUENCES)

    @property
    def largest_config(self) -> SchedulerConfig | None:
        """Of the executor that takes the largest requests; None before the first."""
        return self._engines.config

    @property
    def max_message_bytes(self) -> int:
        """What a message of a client may have now; GetModel says it."""
        most_bytes = most_message_bytes(self._config.max_model_len)
        config = self.largest_config
        return most_bytes if config is None else message_bytes(config, most_bytes)

    @property
    def num_unassigned(self) -> int:
        """Requests no executor has."""
        return len(self._queue) + self._quarantine.num_waiting

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

    async def leave(self, address: str, executor_epoch: int, timeout_s: float) -> None:
        """An executor wants to go; returns when it may. Raises DomainError."""
        await self._engines.leave(address, executor_epoch, timeout_s)

    def _engine_joined(self) -> None:
        self._on_change()
        self._dispatch()

    def _engine_lost(self, engine: EngineLoop, requests: list[Request], cause: LossCause) -> None:
        """Takes back what a closed engine gave away."""
        self._on_change()
        # The owners of others are gone.
        lost = [request for request in requests if self._runs_at(engine, request.request_id)]
        self._tell(self._quarantine.executor_lost(lost, self._loss(engine, cause)))
        self._take_back(engine, lost)
        for tracked in [left for left in self._tracked.values() if left.engine is engine]:
            # A core so broken that it could not even give this one back.
            end_with_fault(tracked.request)
            self._end(tracked.request)
        self._dispatch()

    def _engine_gave_back(self, engine: EngineLoop, requests: list[Request]) -> None:
        """Takes back what an engine that drains gave away."""
        self._on_change()
        self._quarantine.executor_lost(requests, self._loss(engine, LossCause.BLAMELESS))
        self._take_back(engine, requests)
        self._dispatch()

    def _loss(self, engine: EngineLoop, cause: LossCause) -> Loss:
        return Loss(cause, engine.life, self.now_ns(), engine.has_answered)

    def _take_back(self, engine: EngineLoop, requests: list[Request]) -> None:
        for request in sorted(requests, key=lambda moved: moved.arrival):
            if not self._runs_at(engine, request.request_id):
                continue  # its owner is gone
            tracked = self._tracked[request.request_id]
            tracked.request, tracked.engine = request, None
            if request.is_finished:
                self._end(request)
            elif not self._quarantine.holds(request):
                self._queue.push(request)

    def _runs_at(self, engine: EngineLoop, request_id: str) -> bool:
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.engine is engine

    def _tell(self, verdict: Verdict) -> None:
        """Operators learn whom executors died of; `RequestEnded` tells the audit log of an end."""
        for request in verdict.isolated:
            own_id = self._tracked[request.request_id].admission.name.own_id
            num_trials = request.num_trials_left
            _log.warning("request_quarantined request_id=%r num_trials=%d", own_id, num_trials)
            self._audit.record(RequestQuarantined(request.scheduling.tenant, own_id))
        for request in verdict.failed:
            own_id = self._tracked[request.request_id].admission.name.own_id
            _log.error("request_kills_executors request_id=%r why=%r", own_id, request.error)

    def _refill(self, engine: EngineLoop) -> None:
        """An executor plans a step: it may begin what waits."""
        if len(self._queue):
            self._dispatch([engine])
        elif engine.takes_requests:
            self._queue.note(engine.scheduler)
            self._move_one_to(engine)

    def _move_one_to(self, taker: EngineLoop) -> None:
        """An executor has nobody to begin: perhaps somebody waits at another."""
        engines: dict[Host, EngineLoop] = {
            engine.scheduler: engine for engine in self._engines.taking_requests
        }
        if not taker.takes_requests or len(engines) < 2:
            return
        found = self._queue.to_be_moved(self.now_ns(), taker.scheduler, engines)
        if found is None:
            return
        host, request_id = found
        with suppress(ExecutorLost):  # it gives all of its requests back
            moved = engines[host].withdraw(request_id)
            if moved is not None:
                tracked = self._tracked[request_id]
                tracked.request, tracked.engine = moved, None
                self._queue.push(moved)
        self._dispatch()

    def _dispatch(self, changed: Collection[EngineLoop] | None = None) -> None:
        """Gives requests to executors that can begin them; `changed`: of these, None for all."""
        engines: dict[Host, EngineLoop] = {
            engine.scheduler: engine for engine in self._engines.taking_requests
        }
        changed_hosts: list[Host] | None = None
        if changed is not None:
            changed_hosts = [engine.scheduler for engine in changed if engine.takes_requests]
        isolated = self._quarantine.dispatch(list(engines))
        given = self._queue.dispatch(self.now_ns(), engines.keys(), changed_hosts)
        for request, host in chain(isolated, given):
            engine = self._tracked[request.request_id].engine = engines[host]
            try:
                engine.readmit(request)
            except ExecutorLost:  # it gives the request back, and then there is more to do
                break
        self._await_deadline()

    def _await_deadline(self) -> None:
        """Sees to it that whoever waits ends when its deadline is past, if the policy says so."""
        deadline_ns = self._queue.next_deadline_ns
        if deadline_ns == self._awaited_ns:
            return
        self._awaited_ns = deadline_ns
        if self._alarm is not None:
            self._alarm.cancel()
        if deadline_ns is not None:
            delay_s = max(deadline_ns - self.now_ns(), 0) / 1e9 + _PAST_DEADLINE_S
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._end_overdue)

    def _end_overdue(self) -> None:
        self._awaited_ns = None
        for request in self._queue.take_overdue(self.now_ns()):
            self._end(request)
        self._await_deadline()

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
        self._check(request)
        self.delivery.expect(request.request_id, sink)
        self._tracked[request.request_id] = _Tracked(request, admission)
        admission.charge.begin()
        self._queue.push(request)
        self._dispatch([])

    def _check(self, request: Request) -> None:
        """Raises DomainError if no executor can ever run it, or if too many wait."""
        config = self._engines.config
        assert config is not None
        cores = [engine.scheduler for engine in self._engines.taking_requests]
        fitting = next((core for core in cores if core.fits(request)), None)
        if fitting is not None:
            fitting.check(request)
        else:
            for core in cores:
                core.check(request)
            check_request(request, config)
        num_places = self._config.max_num_waiting * max(1, len(cores))
        if not self._queue.has_place(request, num_places):
            message = f"{len(self._queue)} requests wait; allowed: {num_places}"
            if len(self._queue) < num_places:
                message += ", of which some are left to tenants that have fewer"
            raise DomainError("QUEUE_FULL", message, retry_delay_s=QUEUE_FULL_RETRY_S)

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
        if self._alarm is not None:
            self._alarm.cancel()
        await self._engines.close()

    def _end_waiting(self) -> None:
        """Ends streams of which no request runs."""
        for stream in list(self.delivery.streams.values()):
            tracked = [self._tracked.get(name) for name in self.delivery.requests_of(stream)]
            if tracked and all(each is not None and each.engine is None for each in tracked):
                self.fail_stream(stream, self._draining or _draining())

    def _deliver(self, events: StepEvents) -> None:
        self.delivery.deliver(events)
        self._queue.charge(events.num_sampled)
        for request in events.finished:
            self._untrack(request.request_id)

    def _end(self, request: Request) -> None:
        self.delivery.finish(request)
        self._untrack(request.request_id)

    def _untrack(self, request_id: str) -> None:
        """The one way out for a request that was taken."""
        tracked = self._tracked.pop(request_id, None)
        self._queue.forget(request_id)
        self._quarantine.forget(request_id)
        self.delivery.forget(request_id)
        if tracked is not None and tracked.engine is not None:
            self._engines.request_ended(tracked.engine)
        if not self._tracked:
            self._idle.set()
        if tracked is not None:
            tracked.admission.charge.end(tracked.request)


def _draining(peers: tuple[str, ...] = ()) -> DomainError:
    return DomainError("DRAINING", "the scheduler is shutting down", schedulers=peers)
