"""ExecutorService on the wire: streams come and go, the worker behind them stays."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Ends a stream; OK is a plain end."""

    code: grpc.StatusCode
    message: str = ""


@dataclass(slots=True, eq=False)
class Stream:
    """One Execute stream. `is_cut` streams get no more answers."""

    outbox: asyncio.Queue[pb.StepResult | StreamEnd] = field(default_factory=asyncio.Queue)
    is_cut: bool = False

    def cut(self, code: grpc.StatusCode, message: str) -> None:
        """Ends the stream now; answers not yet sent are lost."""
        self.is_cut = True
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(StreamEnd(code, message))


class Desk(Protocol):
    """What the servicer needs of the executor behind it."""

    info: pb.ExecutorInfo
    tokenizer_files: dict[str, bytes]

    def open_stream(self) -> Stream:
        """A scheduler has opened a stream."""
        ...

    def receive(self, stream: Stream, batch: pb.ScheduleBatch | None) -> None:
        """A batch has arrived, or None: the scheduler will send no more."""
        ...

    def close_stream(self, stream: Stream) -> None:
        """The stream is gone."""
        ...


class StrangerServicer(pb_grpc.ExecutorServiceServicer):
    """Carries messages between streams and the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Says what this executor is."""
        return pb.GetInfoResponse(executor=self._desk.info)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Streams dummy files in small chunks, or ends with NOT_FOUND."""
        if not self._desk.tokenizer_files:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this executor has no tokenizer")
        for name, data in self._desk.tokenizer_files.items():
            for start in range(0, len(data), 5):
                yield pb.GetTokenizerResponse(file_name=name, data=data[start : start + 5])

    async def Execute(
        self,
        request_iterator: AsyncIterator[pb.ScheduleBatch],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.StepResult]:
        """Answers batches in the order received."""
        stream = self._desk.open_stream()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while True:
                answer = await stream.outbox.get()
                if isinstance(answer, StreamEnd):
                    if answer.code is not grpc.StatusCode.OK:
                        await context.abort(answer.code, answer.message)
                    return
                yield answer
        finally:
            self._desk.close_stream(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, batches: AsyncIterator[pb.ScheduleBatch], stream: Stream) -> None:
        async for batch in batches:
            self._desk.receive(stream, batch)
        self._desk.receive(stream, None)
