"""The one thread that executes steps, and the way to it and back.

A step that is not done when it has begun is waited for in a second thread, so that the first can
begin what comes next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer, encode_internal_error
from executor_service.steps.batch import StepAnswer
from executor_service.steps.executor_info import ExecutorInfo
from executor_service.steps.step_executor import RunningStep, StepExecutor
from splitserve.executor.v1 import executor_pb2 as pb

_log = logging.getLogger(__name__)

Encode = Callable[[], pb.StepResult]


class StepWorker:
    """Runs a StepExecutor in a thread of its own, in the order of the calls. Never blocks."""

    def __init__(self, step_executor: StepExecutor) -> None:
        self._step_executor = step_executor
        # When each of the batches was received that are not answered, in their order.
        self._received_ns: deque[int] = deque()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Begun steps in their order, for the thread that waits; it starts with the first.
        self._pending: SimpleQueue[RunningStep | None] = SimpleQueue()
        self._waiter: threading.Thread | None = None
        self._thread = threading.Thread(target=self._work, name="step-worker", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Batches that are not answered."""
        return len(self._received_ns)

    def describe(self, info: ExecutorInfo) -> ExecutorInfo:
        """`info`, with what is so at the moment."""
        try:
            running_ns = time.monotonic_ns() - self._received_ns[0]
        except IndexError:
            running_ns = 0
        return replace(
            info,
            newest_scheduler_epoch=self._step_executor.scheduler_epoch,
            step_running_ms=running_ns // 1_000_000,
        )

    def submit(self, batch: pb.ScheduleBatch, then: Callable[[Encode], None]) -> None:
        """Executes `batch`, whatever becomes of the caller.

        `then` is called in the thread, with a function that makes the result: to be called
        elsewhere, so that the next batch begins at once. For the same reason the batch is decoded
        here.
        """
        received_ns = time.monotonic_ns()
        self._received_ns.append(received_ns)
        decoded = decode_batch(batch)

        def deliver(encode: Encode) -> None:
            self._received_ns.popleft()
            try:
                then(encode)
            except Exception:
                # Whoever was to hear of it is gone; those of other batches are not.
                _log.exception("step_result_undeliverable step_id=%d", batch.step_id)

        def begin() -> None:
            queue_us = (time.monotonic_ns() - received_ns) // 1000
            try:
                running = self._step_executor.begin(
                    decoded, lambda answer: deliver(lambda: _encode(batch, answer)), queue_us
                )
            except Exception:
                # A bug of ours; even so each batch gets its result, or the scheduler would wait.
                _log.exception("step_unanswerable step_id=%d", batch.step_id)
                deliver(lambda: encode_internal_error(batch))
            else:
                if running is not None:
                    self._wait_for(running)

        self._jobs.put(begin)

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """Takes its turn after the batches that were submitted before."""
        self._jobs.put(lambda: self._step_executor.adopt_scheduler_epoch(scheduler_epoch))

    def begin_life(self, executor_epoch: int) -> None:
        """Does that after the batches that were submitted before."""
        self._jobs.put(lambda: self._step_executor.begin_life(executor_epoch))

    def finish(self) -> None:
        """Finishes what was submitted and ends the threads; returns then."""
        self._jobs.put(self._step_executor.finish)
        self._jobs.put(None)
        self._thread.join()
        if self._waiter is not None:
            self._pending.put(None)
            self._waiter.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # The next job has nothing to do with it.
                _log.exception("step_worker_job_broken")

    def _wait_for(self, running: RunningStep) -> None:
        """Finishes the step as soon as it is done and the jobs before are."""
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="step-waiter", daemon=True)
            self._waiter.start()
        self._pending.put(running)

    def _wait(self) -> None:
        while (running := self._pending.get()) is not None:
            running.pending.wait()
            self._jobs.put(partial(self._step_executor.finish, running))


def _encode(batch: pb.ScheduleBatch, answer: StepAnswer) -> pb.StepResult:
    try:
        return encode_answer(answer)
    except Exception:
        _log.exception("step_unanswerable step_id=%d", batch.step_id)
        return encode_internal_error(batch)
