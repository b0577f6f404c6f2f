"""All executors and all requests: who runs where, and what happens when an executor is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from scheduler_service.codec import decode_features
from scheduler_service.config import ClusterConfig
from scheduler_service.core.admission import check_request
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import QUEUE_FULL_RETRY_S, Scheduler
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.executor_link import ExecutorLink, ExecutorLost, LinkConfig
from scheduler_service.sinks import Sink
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

# What a step may take of the largest message: a token travels as input, as history and, with blocks
# of one token, as block id; a row has a dozen columns. What does not fit even so (the history of a
# long sequence, many logit biases) is caught when the batch is encoded.
MIN_MESSAGE_BYTES = 64 * 1024
_MESSAGE_BYTES_PER_TOKEN = 32
_MESSAGE_BYTES_PER_ROW = 128

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """An unfinished request, where its tokens go, and who runs it (None: nobody yet)."""

    request: Request
    sink: Sink
    engine: EngineLoop | None = None


class Cluster:
    """Routes requests to executors; a request outlives the executors it runs on."""

    def __init__(
        self, config: ClusterConfig, scheduler_epoch: int, on_change: Callable[[], None]
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
        scheduler_config = _scheduler_config(info, config)
        self._last_scheduler_config = scheduler_config
        link_config = LinkConfig(config.reconnect_timeout_s, config.step_timeout_s)
        epoch, last_step_id = self._last_steps.get(info.address, (0, 0))
        engine = EngineLoop(
            Scheduler(scheduler_config, last_step_id if epoch == info.executor_epoch else 0),
            ExecutorLink(info, link_config),
            self._deliver,
            scheduler_epoch=self.scheduler_epoch,
            pipeline_depth=config.pipeline_depth,
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
        requests = engine.scheduler.evacuate()
        _log.warning(
            "executor_lost address=%s num_requests=%d reason=%r", info.address, len(requests), why
        )
        self._on_change()
        for request in sorted(requests, key=lambda moved: moved.arrival):
            self._tracked[request.request_id].engine = None
            if request.is_finished:
                self._end(request)
            else:
                self._unassigned[request.request_id] = request
        self._assign_unassigned()

    def _assign_unassigned(self) -> None:
        for request in sorted(self._unassigned.values(), key=lambda waiting: waiting.arrival):
            engine = self._choose(request)
            if engine is not None:
                del self._unassigned[request.request_id]
                self._tracked[request.request_id].engine = engine
                engine.scheduler.readmit(request)
                engine.wake_up()
                if request.is_finished:
                    self._end(request)

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

    # -- requests ------------------------------------------------------------------------------

    def next_arrival(self) -> int:
        """A number larger than any before."""
        self._last_arrival += 1
        return self._last_arrival

    def check_not_draining(self) -> None:
        """Raises DomainError(DRAINING)."""
        if self._draining:
            raise DomainError("DRAINING", "the scheduler is shutting down")

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
        if engine is not None:
            engine.scheduler.add(request)
        else:
            self._check_without_executor(request)
            self._unassigned[request.request_id] = request
        self._tracked[request.request_id] = _Tracked(request, sink, engine)
        if request.is_finished:
            self._end(request)
        elif engine is not None:
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
            tracked.engine.scheduler.abort(request_id)
        else:
            self._unassigned.pop(request_id).abort_unscheduled()
        self._end(tracked.request)

    def abandon(self, request_id: str) -> None:
        """The client is gone: ends the request if it is unfinished, and tells nobody."""
        tracked = self._untrack(request_id)
        if tracked is None:
            return
        if tracked.engine is not None:
            tracked.engine.scheduler.abort(request_id)
        else:
            del self._unassigned[request_id]

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets those here finish for `timeout_s`, then ends the rest."""
        self._draining = True
        if self._tracked:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        for request_id, tracked in list(self._tracked.items()):
            self.abandon(request_id)
            tracked.sink.fail(DomainError("DRAINING", "the scheduler is shutting down"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _deliver(self, events: StepEvents) -> None:
        touched: dict[int, Sink] = {}
        for request, scored in events.prompt_logprobs:
            if tracked := self._tracked.get(request.request_id):
                tracked.sink.prompt_logprobs(request, list(scored))
        for index, request in enumerate(events.requests):
            if tracked := self._tracked.get(request.request_id):
                token_id = events.token_ids[index]
                tracked.sink.token(request, token_id, events.logprobs.get(index))
                touched[id(tracked.sink)] = tracked.sink
        for request in events.finished:
            if tracked := self._untrack(request.request_id):
                tracked.sink.finish(request)
                touched[id(tracked.sink)] = tracked.sink
        for sink in touched.values():
            sink.flush()

    def _end(self, request: Request) -> None:
        if tracked := self._untrack(request.request_id):
            tracked.sink.finish(request)
            tracked.sink.flush()

    def _untrack(self, request_id: str) -> _Tracked | None:
        tracked = self._tracked.pop(request_id, None)
        if not self._tracked:
            self._idle.set()
        return tracked


def _fits(request: Request, engine: EngineLoop) -> bool:
    try:
        engine.scheduler.check(request)
    except DomainError:
        return False
    return True


def _scheduler_config(info: executor.ExecutorInfo, config: ClusterConfig) -> SchedulerConfig:
    """The tighter of what the executor can do and what the operator wants."""
    limits, model = info.limits, info.model
    max_rows = min(limits.max_num_rows, limits.max_message_bytes // _MESSAGE_BYTES_PER_ROW)
    max_tokens = min(
        limits.max_num_batched_tokens, limits.max_message_bytes // _MESSAGE_BYTES_PER_TOKEN
    )
    return SchedulerConfig(
        block_size=info.block_size_tokens,
        num_device_blocks=info.num_device_blocks,
        max_num_seqs=min(config.max_num_seqs, max_rows),
        max_num_batched_tokens=min(config.max_num_batched_tokens, max_tokens),
        max_model_len=min(
            config.max_model_len or model.max_model_len_tokens, model.max_model_len_tokens
        ),
        max_num_waiting=config.max_num_waiting,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        features=decode_features(info.features),
    )
