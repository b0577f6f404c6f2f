"""All executors and all requests: who runs where, and what happens when an executor is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from scheduler_service.broken_core import MESSAGE, REASON, CoreBroken, end_with_fault
from scheduler_service.config import ClusterConfig
from scheduler_service.core.admission import check_request
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import QUEUE_FULL_RETRY_S
from scheduler_service.core_config import core_config
from scheduler_service.delivery import Delivery
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.executor_link import ExecutorLink, ExecutorLost, LinkConfig
from scheduler_service.journal.journal import Journal, NoJournal
from scheduler_service.outbox import Unread
from scheduler_service.request_limits import message_bytes, most_message_bytes
from scheduler_service.sinks import Sink, Stream
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

# All streams together may hold as much unread as so many may alone.
_NUM_UNREAD_STREAMS = 16

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """An unfinished request, and who runs it (None: nobody yet)."""

    request: Request
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
    ) -> None:
        self._config = config
        self.scheduler_epoch = scheduler_epoch
        self._on_change = on_change
        self._engines: dict[str, EngineLoop] = {}
        self._last_steps: dict[str, tuple[int, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tracked: dict[str, _Tracked] = {}
        self._unassigned: dict[str, Request] = {}
        self._last_arrival = 0
        max_unread_bytes = config.max_unread_bytes
        unread = Unread(max_unread_bytes, _NUM_UNREAD_STREAMS * max_unread_bytes)
        self.delivery = Delivery(unread, self._end_unread)
        self.now_ns = now_ns
        self._journal = journal or NoJournal()
        self._draining = False
        self._idle = asyncio.Event()
        self.model: executor.ModelInfo | None = None
        self.tokenizer_files: dict[str, bytes] = {}
        self._last_scheduler_config: SchedulerConfig | None = None

    # -- executors -----------------------------------------------------------------------------

    @property
    def engines(self) -> list[EngineLoop]:
        """The connected executors, in order of registration."""
        return list(self._engines.values())

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together, as the latest executor allows."""
        config = self._last_scheduler_config
        return config.max_len if config is not None else 0

    @property
    def largest_config(self) -> SchedulerConfig | None:
        """Of the executor that takes the largest requests; None before the first."""
        return self._last_scheduler_config

    @property
    def max_message_bytes(self) -> int:
        """What a message of a client may have now; GetModel says it."""
        most_bytes = most_message_bytes(self._config.max_model_len)
        config = self.largest_config
        return most_bytes if config is None else message_bytes(config, most_bytes)

    @property
    def num_unassigned(self) -> int:
        """Requests no executor has."""
        return len(self._unassigned)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._tracked)

    def join(self, info: executor.ExecutorInfo) -> None:
        """Takes an executor that has registered and was found acceptable."""
        known = self._engines.get(info.address)
        if known is not None:
            if known.link.info.executor_epoch == info.executor_epoch:
                return
            self._remove(known, "a new executor registered at its address")
        self.model = info.model
        config = self._config
        scheduler_config = core_config(info, config)
        self._last_scheduler_config = scheduler_config
        link_config = LinkConfig(config.reconnect_timeout_s, config.step_timeout_s)
        epoch, last_step_id = self._last_steps.get(info.address, (0, 0))
        core = self._journal.core(
            scheduler_config,
            last_step_id if epoch == info.executor_epoch else 0,
            info.address,
            info.executor_epoch,
        )
        engine = EngineLoop(
            core,
            ExecutorLink(info, link_config),
            self._deliver,
            scheduler_epoch=self.scheduler_epoch,
            pipeline_depth=config.pipeline_depth,
            now_ns=self.now_ns,
        )
        self._engines[info.address] = engine
        task = asyncio.create_task(self._run(engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, engine: EngineLoop) -> None:
        """Lives as long as the executor; then its requests move."""
        info = engine.link.info
        try:
            await engine.link.check_alive()
            if not self.tokenizer_files:
                self.tokenizer_files = await engine.link.tokenizer_files()
            _log.info("executor_joined address=%s epoch=%d", info.address, info.executor_epoch)
            engine.is_connected = True
            self._on_change()
            self._assign_unassigned()
            await engine.run()
        except ExecutorLost as lost:
            self._remove(engine, str(lost))
        except Exception:
            # A fault of ours costs this executor a recompute, not the service its life.
            _log.exception("engine_loop_failed address=%s", info.address)
            self._remove(engine, "its engine loop failed")
        finally:
            await engine.link.close()

    def _remove(self, engine: EngineLoop, why: str) -> None:
        info = engine.link.info
        if self._engines.get(info.address) is not engine:
            return
        del self._engines[info.address]
        engine.is_connected = False
        # Should this life of it come back, its steps are numbered on.
        self._last_steps[info.address] = (info.executor_epoch, engine.scheduler.last_step_id)
        requests = engine.evacuate()
        _log.warning(
            "executor_lost address=%s num_requests=%d reason=%r", info.address, len(requests), why
        )
        self._on_change()
        for request in sorted(requests, key=lambda moved: moved.arrival):
            tracked = self._tracked.get(request.request_id)
            if tracked is None:
                continue  # its owner is gone
            tracked.engine = None
            if request.is_finished:
                self._end(request)
            else:
                self._unassigned[request.request_id] = request
        for tracked in [left for left in self._tracked.values() if left.engine is engine]:
            # A core so broken that it could not even give this one back.
            end_with_fault(tracked.request)
            self._end(tracked.request)
        self._assign_unassigned()

    def _assign_unassigned(self) -> None:
        for request in sorted(self._unassigned.values(), key=lambda waiting: waiting.arrival):
            engine = self._choose(request)
            if engine is not None:
                del self._unassigned[request.request_id]
                self._tracked[request.request_id].engine = engine
                with suppress(CoreBroken):  # then it gives the request back
                    self._ask(engine, "readmit", partial(engine.scheduler.readmit, request))

    def _choose(self, request: Request) -> EngineLoop | None:
        """The connected executor with the least load that `request` fits on.

        One with a full queue is chosen only if the others are full too.
        """
        fitting = [engine for engine in self._connected if _fits(request, engine)]
        return min(
            fitting,
            key=lambda engine: (
                engine.scheduler.is_queue_full,
                engine.scheduler.num_unfinished_tokens,
            ),
            default=None,
        )

    @property
    def _connected(self) -> list[EngineLoop]:
        return [engine for engine in self._engines.values() if engine.is_connected]

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
            self.abandon(request_id)

    # -- requests ------------------------------------------------------------------------------

    def next_arrival(self) -> int:
        """A number larger than any before."""
        self._last_arrival += 1
        return self._last_arrival

    def check_not_draining(self) -> None:
        """Raises DomainError(DRAINING)."""
        if self._draining:
            raise _draining()

    def check_accepting(self) -> None:
        """Raises DomainError DRAINING or MODEL_NOT_READY."""
        self.check_not_draining()
        if self._last_scheduler_config is None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request. Raises DomainError; then nothing has changed.

        While no executor is connected, requests wait for one, up to the queue's bound.
        """
        self.check_accepting()
        if request.request_id in self._tracked:
            raise DomainError(
                "REQUEST_ID_IN_USE", f"request_id {request.request_id!r} is unfinished"
            )
        engine = self._choose(request)
        if engine is None:
            self._check_without_executor(request)
        self.delivery.expect(request.request_id, sink)
        self._tracked[request.request_id] = _Tracked(request, engine)
        if engine is None:
            self._unassigned[request.request_id] = request
            return
        try:
            self._ask(engine, "add", partial(engine.scheduler.add, request))
        except DomainError:
            self._untrack(request.request_id)
            raise
        except CoreBroken as broken:
            self._untrack(request.request_id)
            raise DomainError(REASON, MESSAGE) from broken

    def _ask(self, engine: EngineLoop, name: str, call: Callable[[], object]) -> None:
        """Calls a core, and tells what has ended by it. Raises what the call may, or CoreBroken."""
        core = engine.scheduler
        core.tick(self.now_ns())
        engine.call(name, call)
        self._deliver(engine.call("take_ended", core.take_ended))
        engine.wake_up()

    def _check_without_executor(self, request: Request) -> None:
        """Nobody takes it now: says why if that is the request's fault, or that too many wait."""
        assert self._last_scheduler_config is not None
        for engine in self._connected:
            engine.scheduler.check(request)
        check_request(request, self._last_scheduler_config)
        if len(self._unassigned) >= self._config.max_num_waiting:
            raise DomainError(
                "QUEUE_FULL",
                f"{len(self._unassigned)} requests wait; allowed: {self._config.max_num_waiting}",
                retry_delay_s=QUEUE_FULL_RETRY_S,
            )

    def abort(self, request_id: str) -> None:
        """Ends a request. Raises DomainError(REQUEST_UNKNOWN)."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            raise DomainError("REQUEST_UNKNOWN", f"no unfinished request {request_id!r}")
        if tracked.engine is not None:
            with suppress(CoreBroken):
                abort = partial(tracked.engine.scheduler.abort, request_id)
                self._ask(tracked.engine, "abort", abort)
                return
        else:
            del self._unassigned[request_id]
        tracked.request.abort_unscheduled()
        self._end(tracked.request)

    def abandon(self, request_id: str) -> None:
        """The client is gone: ends the request if it is unfinished, and tells nobody."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        self._untrack(request_id)
        if tracked.engine is not None:
            with suppress(CoreBroken):
                abort = partial(tracked.engine.scheduler.abort, request_id)
                self._ask(tracked.engine, "abort", abort)
        else:
            del self._unassigned[request_id]

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets those here finish for `timeout_s`, then ends the rest."""
        self._draining = True
        if self._tracked:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        for request_id in list(self._tracked):
            self.delivery.fail(request_id, _draining())
            self.abandon(request_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _deliver(self, events: StepEvents) -> None:
        self.delivery.deliver(events)
        for request in events.finished:
            self._untrack(request.request_id)

    def _end(self, request: Request) -> None:
        self.delivery.finish(request)
        self._untrack(request.request_id)

    def _untrack(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)
        self.delivery.forget(request_id)
        if not self._tracked:
            self._idle.set()


def _fits(request: Request, engine: EngineLoop) -> bool:
    try:
        engine.scheduler.check(request)
    except DomainError:
        return False
    return True


def _draining() -> DomainError:
    return DomainError("DRAINING", "the scheduler is shutting down")
