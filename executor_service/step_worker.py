"""The one thread that executes steps, and the way to it and back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from executor_service.batch import StepAnswer
from executor_service.codec import decode_batch, encode_answer, encode_internal_error
from executor_service.step_executor import StepExecutor
from splitserve.executor.v1 import executor_pb2 as pb

_log = logging.getLogger(__name__)


class StepWorker:
    """Runs a StepExecutor in a thread of its own, in the order of the calls. Never blocks."""

    def __init__(self, step_executor: StepExecutor) -> None:
        self._step_executor = step_executor
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="step-worker", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return self._jobs.qsize()

    def submit(
        self, batch: pb.ScheduleBatch, then: Callable[[Callable[[], pb.StepResult]], None]
    ) -> None:
        """Executes `batch`, whatever becomes of the caller.

        `then` is called in the thread, with a function that makes the result: to be called
        elsewhere, so that the next batch begins at once. For the same reason the batch is decoded
        here.
        """
        received_ns = time.monotonic_ns()
        decoded = decode_batch(batch)

        def execute() -> None:
            queue_us = (time.monotonic_ns() - received_ns) // 1000
            try:
                answer = self._step_executor.execute(decoded, queue_us)
            except Exception:
                # A bug of ours; even so each batch gets its result, or the scheduler would wait.
                _log.exception("step_unanswerable step_id=%d", batch.step_id)
                then(lambda: encode_internal_error(batch))
            else:
                then(lambda: _encode(batch, answer))

        self._jobs.put(execute)

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """See StepExecutor; takes its turn after the batches submitted before."""
        self._jobs.put(lambda: self._step_executor.adopt_scheduler_epoch(scheduler_epoch))

    def finish(self) -> None:
        """Finishes what was submitted and ends the thread; returns then."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # Whoever was to hear of it is gone; the next job is not.
                _log.exception("step_worker_job_broken")


def _encode(batch: pb.ScheduleBatch, answer: StepAnswer) -> pb.StepResult:
    try:
        return encode_answer(answer)
    except Exception:
        _log.exception("step_unanswerable step_id=%d", batch.step_id)
        return encode_internal_error(batch)
