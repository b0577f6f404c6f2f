"""Driver of the scheduler: passes events in, executes effects, and owns the timer.

The driver decides nothing. A request outlives the executors that compute its steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import assert_never

from scheduler_service.adapters import AdapterRegistry
from scheduler_service.audit import Audit, NoAudit
from scheduler_service.callers import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.executors import Connect, Drained, ExecutorLink, Membership
from scheduler_service.journal import Journal, NoJournal
from scheduler_service.request_limits import RequestKey, RequestName
from scheduler_service.scheduler import ExecutorState, Scheduler, effects, events
from scheduler_service.scheduler.values import Request, StepEvents
from scheduler_service.served import Served
from scheduler_service.step_codec import EncodedBatch, ReceivedResult, encode_once
from scheduler_service.streams import (
    Delivery,
    Keeping,
    KeptOutputs,
    Sink,
    Stream,
    UnreadLimits,
)
from scheduler_service.watching import OperatorLog, RequestRefused, Submission, Transition, Watcher
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_contract import DomainError

# Longest wait for an executor to load an adapter that an operator registers.
_LOAD_AHEAD_S = 20.0
# Limit of unread bytes of all streams together, in multiples of the limit of one stream.
_NUM_UNREAD_STREAMS = 16
# Watchers are told the name of the model in turns of these events.
_NAMES_MODEL = frozenset({events.RequestSubmitted, events.ExecutorConnected})

_log = logging.getLogger(__name__)


class Driver:
    """Event loop around a `Scheduler`, between clients and executors.

    `on_change` is called when readiness may have changed. `watchers` see every turn, after its
    effects were executed. `delivery` holds the streams of clients. `adapters`: those that requests
    may name. `now_ns`: monotonic clock.
    """

    def __init__(
        self,
        config: ClusterConfig,
        scheduler_epoch: int,
        on_change: Callable[[], None],
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        journal: Journal | None = None,
        audit: Audit | None = None,
        watchers: Sequence[Watcher] = (),
        connect: Connect = ExecutorLink,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._config = config
        self.adapters = adapters or AdapterRegistry()
        self.scheduler_epoch = scheduler_epoch
        self._on_change = on_change
        self.now_ns = now_ns
        self._journal = journal or NoJournal()
        self._watchers = (OperatorLog(audit or NoAudit(), self._journal), *watchers)
        self.scheduler = Scheduler(config.fleet)
        self._journal.begin(self.scheduler, config.fleet)
        self._inbox: deque[tuple[events.Event, ReceivedResult | None]] = deque()
        self._is_handling = False
        self._timer: asyncio.Handle | None = None
        self._last_arrival = 0
        self._draining: DomainError | None = None
        self._idle = asyncio.Event()
        self._tracked: dict[str, Submission] = {}
        max_unread_bytes = config.max_unread_bytes
        unread = UnreadLimits(max_unread_bytes, _NUM_UNREAD_STREAMS * max_unread_bytes)
        self.delivery = Delivery(unread, self._end_unread)
        self.kept_outputs = KeptOutputs(now_ns)
        self.membership = Membership(
            config, scheduler_epoch, now_ns, connect, self._handle, self.adapters
        )
        self.served = Served(self.membership, self.scheduler, config.max_model_len)

    # -- Event loop ----------------------------------------------------------------------------

    def _handle(self, event: events.Event, received: ReceivedResult | None = None) -> None:
        """Passes an event to the scheduler, and executes its effects before the next event.

        An event that arrives meanwhile is queued. Raises what the scheduler raises.
        """
        self._inbox.append((event, received))
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._inbox:
                self._handle_one(*self._inbox.popleft())
        finally:
            self._is_handling = False
            if self._inbox:
                asyncio.get_running_loop().call_soon(self._handle, events.Tick())

    def _handle_one(self, event: events.Event, received: ReceivedResult | None) -> None:
        begun_ns = self.now_ns()
        record = self._journal.record(event, begun_ns, received)
        try:
            found = self.scheduler.handle(event, begun_ns)
        except Exception as error:
            record.raised(error)
            raise
        batches: list[EncodedBatch] = []
        planning_ns = self.now_ns() - begun_ns
        submission = None
        if isinstance(event, events.RequestSubmitted):
            submission = self._tracked.get(event.request.request_id)
        try:
            for effect in found:
                if isinstance(effect, effects.SendStep):
                    sending_ns = self.now_ns()
                    batches.append(self.membership.sessions[effect.address].send(effect.plan))
                    planning_ns += self.now_ns() - sending_ns
                else:
                    self._execute(effect)
        finally:
            record.done(found, batches)
        planning_ns //= max(1, len(batches))
        self._show(Transition.of(event, found, begun_ns, self.scheduler, planning_ns, submission))

    def _show(self, turn: Transition) -> None:
        """Shows a turn to all watchers."""
        if type(turn.event) in _NAMES_MODEL:
            model = self.membership.model
            turn = turn._replace(model_name="" if model is None else model.name)
        for watcher in self._watchers:
            watcher.see(turn)

    def refused(self, refused: RequestRefused) -> None:
        """Shows a request that was refused before its submission to all watchers."""
        self._show(Transition(refused, (), self.now_ns(), self.scheduler))

    def _execute(self, effect: effects.Effect) -> None:
        match effect:
            case effects.DeliverTokens(found):
                self._deliver(found)
            case effects.WakeAt(at_ns):
                self._set_timer(at_ns)
            case effects.LoadAdapter(address):
                self.membership.sessions[address].adapters.load(effect)
            case effects.RequestFinished(request):
                self.delivery.finish(request)
                self._untrack(request)
            case effects.ExecutorGone():
                self._on_change()
                self.membership.removed(effect)
            case effects.ExecutorServes() | effects.ExecutorHealthChanged():
                self._on_change()
            case (
                effects.RequestAssigned()
                | effects.RequestMoved()
                | effects.RequestQuarantined()
                | effects.RequestAcquitted()
                | effects.RequestBlamed()
                | effects.EngineFailed()
            ):
                pass  # for watchers only
            case effects.SendStep():
                raise AssertionError("SendStep is handled before the other effects")
            case _:
                assert_never(effect)

    def _deliver(self, found: StepEvents) -> None:
        self.delivery.deliver(found)
        for request in found.finished:
            self._untrack(request)

    def _set_timer(self, at_ns: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_ns is None:
            return
        loop, delay_ns = asyncio.get_running_loop(), at_ns - self.now_ns()
        if delay_ns <= 0:
            self._timer = loop.call_soon(self._tick)
        else:
            self._timer = loop.call_later(delay_ns / 1e9, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._handle(events.Tick())
        except Exception:
            _log.exception("scheduler_invariant_broken")

    def look_again(self) -> None:
        """Checks all executors for work, as if everything had changed."""
        self._handle(events.Tick(looks_everywhere=True))

    # -- Executors -----------------------------------------------------------------------------

    @property
    def executors(self) -> list[ExecutorState]:
        """State of the executors that were taken in, in order of registration."""
        return list(self.scheduler.executors.values())

    def info_of(self, address: str) -> executor.ExecutorInfo:
        """Returns the info that the executor at `address`, one of `executors`, registered with."""
        return self.membership.sessions[address].info

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Sets the weights of tenants for the policy `fair`.

        The waiting queue uses the new weights at once, engines only of executors that join later.
        """
        self.membership.weigh_tenants(weights)
        self._handle(events.TenantsWeighed(weights))

    async def join(self, info: executor.ExecutorInfo, target: str | None = None) -> None:
        """Takes in an executor that registers, once it has answered GetInfo. Raises DomainError.

        `target`: address to dial, if another than that of `info`.
        """
        self.check_not_draining()
        await self.membership.join(info, target)

    async def drain_executor(self, address: str, timeout_s: float) -> Drained:
        """Drains an executor, and returns when the executor is removed. Raises DomainError."""
        return await self.membership.drain(address, timeout_s)

    async def load_ahead(self, adapter: str) -> None:
        """Loads an adapter before any request names it, if an executor has a slot for it.

        `adapter`: the reference of a version whose files are held. Raises
        DomainError(ADAPTER_INVALID) if the executor cannot load it.
        """
        self._handle(events.AdapterRegistered(adapter))
        for address, known in self.scheduler.executors.items():
            if known.engine.adapter_slots.is_loading(adapter):
                ended = self.membership.sessions[address].adapters.ended(adapter)
                with suppress(TimeoutError):
                    if why_not := await asyncio.wait_for(ended, _LOAD_AHEAD_S):
                        raise DomainError("ADAPTER_INVALID", why_not)
                return

    def undrain_executor(self, address: str) -> None:
        """Takes back an executor that drains or was drained. Raises DomainError."""
        known = self.scheduler.executors.get(address)
        self.membership.undrain(address, 0 if known is None else known.num_moved)

    async def leave(self, address: str, executor_epoch: int, timeout_s: float) -> None:
        """Drains an executor at its own wish, and returns when it may exit. Raises DomainError."""
        await self.membership.leave(address, executor_epoch, timeout_s)

    # -- State of the scheduler ----------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """True during shutdown: the scheduler refuses new requests."""
        return self._draining is not None

    @property
    def num_unfinished(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._tracked)

    def name_of(self, request: Request) -> str:
        """Returns the client's own id of an unfinished request."""
        return self._tracked[request.request_id].admission.name.own_id

    @property
    def submissions(self) -> Mapping[str, Submission]:
        """Submissions of the unfinished requests, by request id."""
        return self._tracked

    # -- Streams of clients ----------------------------------------------------------------------

    @contextmanager
    def client_stream(self, stream: Stream) -> Iterator[None]:
        """Keeps a stream open within the block; leaving the block aborts its requests."""
        self.delivery.open_stream(stream)
        try:
            yield
        finally:
            stream.outbox.close()
            self._end_requests(stream)
            self.delivery.close_stream(stream)

    def fail_stream(self, stream: Stream, error: DomainError) -> None:
        """Ends a stream with `error` after its queued messages; aborts its requests at once."""
        stream.outbox.end(error)
        self._end_requests(stream)

    def _end_unread(self, stream: Stream) -> None:
        num_bytes = stream.outbox.num_bytes
        _log.info("stream_not_read number=%d num_bytes=%d", stream.number, num_bytes)
        error = DomainError(
            "STREAM_NOT_READ",
            f"the stream has {num_bytes} unread bytes; allowed: {self._config.max_unread_bytes}, "
            f"and {_NUM_UNREAD_STREAMS} times that in all streams together",
        )
        stream.outbox.close(error)
        # Not now: the tokens of this step have still to be delivered to other streams.
        asyncio.get_running_loop().call_soon(self._end_requests, stream)

    def _end_requests(self, stream: Stream) -> None:
        for request_id in self.delivery.requests_of(stream):
            self._abandon(request_id)

    # -- Requests ------------------------------------------------------------------------------

    def next_arrival(self) -> int:
        """Returns the next arrival number, larger than all before."""
        self._last_arrival += 1
        return self._last_arrival

    def check_not_draining(self) -> None:
        """Raises DomainError(DRAINING) if the scheduler is shutting down."""
        if self._draining is not None:
            raise _draining(self._draining.schedulers)

    def check_accepting(self) -> None:
        """Raises DomainError unless requests are accepted: DRAINING or MODEL_NOT_READY."""
        self.check_not_draining()
        if self.scheduler.capabilities.largest_config is None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")

    def submit(
        self, request: Request, sink: Sink, admission: Admission, keeping: Keeping | None = None
    ) -> None:
        """Submits a request, whose events go to `sink`. Raises DomainError; nothing changed then.

        While no executor is connected, requests wait in the waiting queue, up to its bound.
        `keeping`: how its output is kept; None if it is not.
        """
        assert request.request_id == admission.name.key
        self.check_accepting()
        if request.request_id in self._tracked:
            raise DomainError(
                "REQUEST_ID_IN_USE", f"request_id {admission.name.own_id!r} is unfinished"
            )
        self.scheduler.check(request)
        self.adapters.hold(request.scheduling.adapter)
        self.delivery.expect(request.request_id, sink)
        if keeping is not None:
            self.kept_outputs.begin(request, keeping)
            if keeping.resumes:
                sink.repeat_output(request)
        admission.charge.begin()
        num_waiting = self.scheduler.num_waiting
        self._tracked[request.request_id] = Submission(admission, self.now_ns(), num_waiting)
        self._handle(events.RequestSubmitted(request))
        if request.params_set.num_bytes:
            # Long parameters take milliseconds to encode, which a step with many rows would wait.
            encode_once(request.params_set)

    def abort(self, name: RequestName) -> None:
        """Aborts a request. Raises DomainError(REQUEST_UNKNOWN)."""
        if name.key not in self._tracked:
            raise DomainError("REQUEST_UNKNOWN", f"no unfinished request {name.own_id!r}")
        self._handle(events.RequestAborted(name.key))

    def end_kept(self, key: RequestKey) -> None:
        """Aborts the unfinished request whose output is kept under `key`, if there is one."""
        request_id = self.kept_outputs.unfinished(key)
        if request_id is not None:
            self._handle(events.RequestAborted(request_id))

    def _abandon(self, request_id: str) -> None:
        """Aborts a request whose client is gone, if it is unfinished; its sink gets no Finish."""
        if request_id in self._tracked:
            self.delivery.forget(request_id)
            self._handle(events.RequestAborted(request_id))

    async def drain(self, timeout_s: float, peers: tuple[str, ...] = ()) -> None:
        """Refuses new requests, waits `timeout_s` for the unfinished ones, then ends the rest.

        `peers`: addresses of schedulers that may take over. If there are any, streams with only
        waiting requests end at once: nothing of them has been computed here. A running request
        would have to be computed again elsewhere, and may finish here before that.
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
        self._set_timer(None)
        await self.membership.close()
        self._set_timer(None)

    def _end_waiting(self) -> None:
        """Ends the streams whose requests all wait."""
        locations = self.scheduler.locations
        for stream in list(self.delivery.streams.values()):
            found = [locations.get(name) for name in self.delivery.requests_of(stream)]
            if found and all(each is not None and each.executor is None for each in found):
                self.fail_stream(stream, self._draining or _draining())

    def _untrack(self, request: Request) -> None:
        """Removes a request that has ended, and charges its tenant; all requests end here."""
        self.delivery.forget(request.request_id)
        self.kept_outputs.end(request)
        tracked = self._tracked.pop(request.request_id, None)
        if not self._tracked:
            self._idle.set()
        if tracked is not None:
            tracked.admission.charge.end(request)
            self.adapters.release(request.scheduling.adapter)


def _draining(peers: tuple[str, ...] = ()) -> DomainError:
    return DomainError("DRAINING", "the scheduler is shutting down", schedulers=peers)
