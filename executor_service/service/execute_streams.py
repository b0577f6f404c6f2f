"""The open Execute streams of an executor. Used from the event loop only."""

from __future__ import annotations

import asyncio

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_rpc.domain_error import DomainError


class ExecuteStream:
    """One Execute call: how many batches have no result yet, and the results to send."""

    def __init__(self, number: int, max_inflight_steps: int) -> None:
        self.number = number
        self.scheduler_epoch = 0
        self.reader: asyncio.Task[None] | None = None
        self.num_unanswered = 0
        self._is_complete = False
        self._credit = asyncio.Semaphore(max_inflight_steps)
        # None: the end. An exception: the end, with this error.
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

    def complete(self) -> None:
        """No batch will follow: the stream ends when all are answered."""
        self._is_complete = True
        if self.num_unanswered == 0:
            self._results.put_nowait(None)

    def fail(self, error: BaseException) -> None:
        """Ends the stream with `error`, after the results that are queued."""
        self._results.put_nowait(error)

    async def next_result(self) -> pb.StepResult | None:
        """The next result, None at the end. Raises what ended the stream."""
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result


class ExecuteStreams:
    """All open streams; a newer one ends the older ones when its first batch was accepted.

    `num_batches`: received over all of them, ever.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self._open: list[ExecuteStream] = []
        self._num_opened = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._any_open = asyncio.Event()

    def open(self, max_inflight_steps: int) -> ExecuteStream:
        """Adds a stream."""
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
        """How many."""
        return len(self._open)

    @property
    def are_open(self) -> bool:
        """Whether there is one."""
        return bool(self._open)

    async def wait_open(self) -> None:
        """Returns when a stream is open."""
        await self._any_open.wait()

    async def wait_none_open(self) -> None:
        """Returns when no stream is open."""
        await self._none_open.wait()

    def accept(self, stream: ExecuteStream, scheduler_epoch: int) -> None:
        """A batch of `scheduler_epoch` was taken from `stream`; ends the streams it supersedes."""
        if scheduler_epoch <= stream.scheduler_epoch or stream not in self._open:
            return
        stream.scheduler_epoch = scheduler_epoch
        for other in self._open:
            if other.number < stream.number and other.scheduler_epoch <= stream.scheduler_epoch:
                other.fail(
                    DomainError("STREAM_SUPERSEDED", "a newer Execute stream took this one's place")
                )

    def stop_reading(self) -> None:
        """Takes no further batches from any stream."""
        for stream in self._open:
            if stream.reader is not None:
                stream.reader.cancel()

    def fail_all(self, error: DomainError) -> None:
        """Ends all streams, after their queued results."""
        for stream in self._open:
            stream.fail(error)
