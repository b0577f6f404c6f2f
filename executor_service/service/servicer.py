"""ExecutorService: receives batches, passes them to the step worker, and sends results.

Also holds the open Execute streams of the executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import grpc.aio

from executor_service.service.adapter_loading import AdapterLoading
from executor_service.service.answer_encoding import encode_info
from executor_service.service.step_worker import StepWorker
from executor_service.steps import ExecutorInfo, TokenizerFile, read_tokenizer_file
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_contract import DomainError

SERVICE = "splitserve.executor.v1.ExecutorService"
_CHUNK_BYTES = 1024 * 1024
# Statuses of an accepted batch, executed now or before.
_TAKEN = frozenset({pb.STEP_STATUS_OK, pb.STEP_STATUS_FAILED})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyExecutor:
    """Components that are served. `info` returns the current state; the address may change.

    `is_drained`: whether a scheduler drained this executor. `adapters`: None if none are served.
    """

    worker: StepWorker
    info: Callable[[], ExecutorInfo]
    tokenizer_files: Mapping[str, TokenizerFile] = field(default_factory=dict)
    is_drained: Callable[[], bool] = lambda: False
    adapters: AdapterLoading | None = None


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Answers MODEL_NOT_READY until `serve` is called, and DRAINING once it drains."""

    def __init__(self, answered: Callable[[pb.StepResult], None] | None = None) -> None:
        """`answered`: called with each result, even if its stream is closed."""
        self.streams = ExecuteStreams()
        self._answered = answered
        # Only reported by GetInfo; batches are still executed.
        self.is_leaving = False
        self._executor: ReadyExecutor | None = None
        self._is_draining = False

    def serve(self, executor: ReadyExecutor) -> None:
        """Serves `executor` from now on."""
        self._executor = executor

    async def drain(self) -> None:
        """Stops reading batches, finishes those received, sends their results, ends the streams."""
        self._is_draining = True
        self.streams.stop_reading()
        if self._executor is not None:
            await asyncio.to_thread(self._executor.worker.finish)
        self.streams.fail_all(_draining())

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Returns the description of this executor."""
        ready = self._ready_executor()
        return pb.GetInfoResponse(
            executor=encode_info(ready.info()),
            draining=self.is_leaving,
            drained=ready.is_drained(),
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Streams the tokenizer files in chunks of at most 1 MiB."""
        files = self._ready_executor().tokenizer_files
        if not files:
            raise DomainError("TOKENIZER_UNAVAILABLE", "the model has no tokenizer")
        for name, file in files.items():
            content = await asyncio.to_thread(read_tokenizer_file, file)
            for start in range(0, max(1, len(content)), _CHUNK_BYTES):
                data = content[start : start + _CHUNK_BYTES]
                yield pb.GetTokenizerResponse(file_name=name, data=data)

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ScheduleBatch], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepResult]:
        """Executes batches in the order received; their results come in the same order."""
        executor = self._ready_executor()
        if self._is_draining:
            raise _draining()
        with self._open_stream(executor, request_iterator) as stream:
            while (result := await stream.next_result()) is not None:
                yield result

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Loads an adapter, and answers when rows may name it."""
        ready = self._ready_executor()
        if ready.adapters is None:
            raise DomainError("FEATURE_UNSUPPORTED", "this executor loads no adapters")
        info = ready.info()
        if request.executor_epoch != info.executor_epoch:
            message = f"executor_epoch is {request.executor_epoch}; now: {info.executor_epoch}"
            raise DomainError("STALE_EPOCH", message)
        if request.scheduler_epoch < info.newest_scheduler_epoch:
            message = f"scheduler_epoch is {request.scheduler_epoch}; newest:"
            raise DomainError("STALE_EPOCH", f"{message} {info.newest_scheduler_epoch}")
        await ready.adapters.load(request.adapter, request.kept_adapters)
        return pb.LoadAdapterResponse()

    @contextlib.contextmanager
    def _open_stream(
        self, executor: ReadyExecutor, batches: AsyncIterator[pb.ScheduleBatch]
    ) -> Iterator[ExecuteStream]:
        stream = self.streams.open(executor.info().limits.max_inflight_steps)
        _log.info("execute_stream_opened number=%d", stream.number)
        stream.reader = asyncio.create_task(self._read(executor.worker, batches, stream))
        stream.reader.add_done_callback(lambda task: _pass_error(task, stream))
        try:
            yield stream
        finally:
            stream.reader.cancel()
            self.streams.close(stream)
            _log.info("execute_stream_closed number=%d", stream.number)

    async def _read(
        self, worker: StepWorker, batches: AsyncIterator[pb.ScheduleBatch], stream: ExecuteStream
    ) -> None:
        """Passes batches to the worker, which executes them even if the stream is cut meanwhile."""
        loop = asyncio.get_running_loop()

        def answer(encode: Callable[[], pb.StepResult]) -> None:
            result = encode()
            if self._answered is not None:
                self._answered(result)
            if result.status in _TAKEN:
                self.streams.accept(stream, result.scheduler_epoch)
            stream.deliver(result)

        def deliver(encode: Callable[[], pb.StepResult]) -> None:
            loop.call_soon_threadsafe(answer, encode)

        def report(encode: Callable[[], pb.StepResult]) -> None:
            # A closed loop raises: nobody is left to receive the part.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: stream.deliver_part(encode()))

        await stream.take_credit()
        async for batch in batches:
            self.streams.num_batches += 1
            stream.num_unanswered += 1
            worker.submit(batch, deliver, report)
            # The batch is submitted already: a cut while waiting here loses nothing.
            await stream.take_credit()
        stream.complete()

    def _ready_executor(self) -> ReadyExecutor:
        if self._executor is None:
            raise DomainError("MODEL_NOT_READY", "the model is still being loaded")
        return self._executor


def _pass_error(reader: asyncio.Task[None], stream: ExecuteStream) -> None:
    if not reader.cancelled() and (error := reader.exception()) is not None:
        stream.fail(error)


def _draining() -> DomainError:
    return DomainError("DRAINING", "the executor is shutting down")


# -- Open Execute streams --------------------------------------------------------------------------
#
# Used from the event loop only.


class ExecuteStream:
    """State of an Execute call: number of batches without a result, and results to send."""

    def __init__(self, number: int, max_inflight_steps: int) -> None:
        self.number = number
        self.scheduler_epoch = 0
        self.reader: asyncio.Task[None] | None = None
        self.num_unanswered = 0
        self._is_complete = False
        self._credit = asyncio.Semaphore(max_inflight_steps)
        # None ends the stream; an exception ends it with this error.
        self._results: asyncio.Queue[pb.StepResult | BaseException | None] = asyncio.Queue()

    async def take_credit(self) -> None:
        """Waits until one more batch may be in flight."""
        await self._credit.acquire()

    def deliver(self, result: pb.StepResult) -> None:
        """Queues a result to be sent."""
        self.num_unanswered -= 1
        self._credit.release()
        self._results.put_nowait(result)
        if self._is_complete and self.num_unanswered == 0:
            self._results.put_nowait(None)

    def deliver_part(self, part: pb.StepResult) -> None:
        """Queues a part of the result of the oldest batch without a result."""
        self._results.put_nowait(part)

    def complete(self) -> None:
        """Marks the end of the batches: the stream ends when all of them are answered."""
        self._is_complete = True
        if self.num_unanswered == 0:
            self._results.put_nowait(None)

    def fail(self, error: BaseException) -> None:
        """Ends the stream with `error`, after the results that are queued."""
        self._results.put_nowait(error)

    async def next_result(self) -> pb.StepResult | None:
        """Returns the next result, None at the end. Raises the error that ended the stream."""
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result


class ExecuteStreams:
    """Open streams. A newer stream ends the older ones when its first batch is accepted.

    `num_batches`: number of batches received over all streams since the start.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self._open: list[ExecuteStream] = []
        self._num_opened = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._any_open = asyncio.Event()

    def open(self, max_inflight_steps: int) -> ExecuteStream:
        """Opens and adds a stream."""
        self._num_opened += 1
        stream = ExecuteStream(self._num_opened, max_inflight_steps)
        self._open.append(stream)
        self._none_open.clear()
        self._any_open.set()
        return stream

    def close(self, stream: ExecuteStream) -> None:
        """Removes a stream."""
        self._open.remove(stream)
        if not self._open:
            self._none_open.set()
            self._any_open.clear()

    @property
    def num_open(self) -> int:
        """Number of open streams."""
        return len(self._open)

    @property
    def are_open(self) -> bool:
        """Whether any stream is open."""
        return bool(self._open)

    async def wait_open(self) -> None:
        """Returns when a stream is open."""
        await self._any_open.wait()

    async def wait_none_open(self) -> None:
        """Returns when no stream is open."""
        await self._none_open.wait()

    def accept(self, stream: ExecuteStream, scheduler_epoch: int) -> None:
        """Notes that a batch of `scheduler_epoch` was accepted; ends the superseded streams."""
        if scheduler_epoch <= stream.scheduler_epoch or stream not in self._open:
            return
        stream.scheduler_epoch = scheduler_epoch
        for other in self._open:
            if other.number < stream.number and other.scheduler_epoch <= stream.scheduler_epoch:
                other.fail(
                    DomainError("STREAM_SUPERSEDED", "a newer Execute stream replaced this one")
                )

    def stop_reading(self) -> None:
        """Reads no further batches from any stream."""
        for stream in self._open:
            if stream.reader is not None:
                stream.reader.cancel()

    def fail_all(self, error: DomainError) -> None:
        """Ends all streams, after their queued results."""
        for stream in self._open:
            stream.fail(error)
