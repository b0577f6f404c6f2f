"""ExecutorService: batches in, steps to the worker thread, results out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import grpc.aio

from executor_service.service.encode_answer import encode_info
from executor_service.service.execute_streams import ExecuteStream, ExecuteStreams
from executor_service.service.step_worker import StepWorker
from executor_service.steps.executor_info import (
    ExecutorInfo,
    TokenizerFile,
    read_tokenizer_file,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc.domain_error import DomainError

SERVICE = "splitserve.executor.v1.ExecutorService"
_CHUNK_BYTES = 1024 * 1024
# What a batch is answered with that was taken, now or before.
_TAKEN = frozenset({pb.STEP_STATUS_OK, pb.STEP_STATUS_FAILED})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyExecutor:
    """What is served. `info` says what the executor is now; its address may change.

    `is_drained`: whether a scheduler sent it away.
    """

    worker: StepWorker
    info: Callable[[], ExecutorInfo]
    tokenizer_files: Mapping[str, TokenizerFile] = field(default_factory=dict)
    is_drained: Callable[[], bool] = lambda: False


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Answers MODEL_NOT_READY until it is given what to serve, DRAINING once it drains."""

    def __init__(self, answered: Callable[[pb.StepResult], None] | None = None) -> None:
        """`answered`: is told of each result, whoever gets it."""
        self.streams = ExecuteStreams()
        self._answered = answered
        # Says so; batches are still executed.
        self.is_leaving = False
        self._executor: ReadyExecutor | None = None
        self._is_draining = False

    def serve(self, executor: ReadyExecutor) -> None:
        """Serves `executor` from now on."""
        self._executor = executor

    async def drain(self) -> None:
        """Takes no more batches, finishes those received, sends their results, ends the streams."""
        self._is_draining = True
        self.streams.stop_reading()
        if self._executor is not None:
            await asyncio.to_thread(self._executor.worker.finish)
        self.streams.fail_all(_draining())

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Says what this executor is."""
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
            raise DomainError("TOKENIZER_UNAVAILABLE", "this model comes without a tokenizer")
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
        """Hands batches to the worker. They are executed even if the stream is cut meanwhile."""
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

        await stream.take_credit()
        async for batch in batches:
            self.streams.num_batches += 1
            stream.num_unanswered += 1
            worker.submit(batch, deliver)
            # What was read is submitted already: a cut while we wait here loses nothing.
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
