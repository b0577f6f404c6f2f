"""Thread that executes steps, and the queues to and from it.

A second thread waits for steps that are not done when they have begun, so that the first thread can
begin the next step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

from executor_service.service.answer_encoding import encode_answer, encode_internal_error
from executor_service.service.batch_decoding import decode_batch
from executor_service.service.part_reports import PartReports
from executor_service.steps import (
    ExecutorInfo,
    RunningStep,
    RunWatch,
    StepAnswer,
    StepExecutor,
    TokenRuns,
)
from splitserve.executor.v1 import executor_pb2 as pb

_log = logging.getLogger(__name__)

Encode = Callable[[], pb.StepResult]


@dataclass(frozen=True, slots=True, eq=False)
class _ReceivedBatch:
    """Batch without an answer. `received_ns`: time of receipt."""

    received_ns: int


class StepWorker:
    """Runs a StepExecutor in its own thread, in the order of the calls. Methods do not block."""

    def __init__(self, step_executor: StepExecutor) -> None:
        self._step_executor = step_executor
        # In order of receipt.
        self._unanswered: deque[_ReceivedBatch] = deque()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Begun steps in order, for the thread that waits; that thread starts with the first of
        # them.
        self._pending: SimpleQueue[RunningStep | None] = SimpleQueue()
        self._waiter: threading.Thread | None = None
        self._thread = threading.Thread(target=self._work, name="step-worker", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Number of batches without an answer."""
        return len(self._unanswered)

    def describe(self, info: ExecutorInfo) -> ExecutorInfo:
        """Returns `info` with the newest scheduler epoch and the age of the running step."""
        try:
            running_ns = time.monotonic_ns() - self._unanswered[0].received_ns
        except IndexError:
            running_ns = 0
        return replace(
            info,
            newest_scheduler_epoch=self._step_executor.scheduler_epoch,
            step_running_ms=running_ns // 1_000_000,
        )

    def submit(
        self,
        batch: pb.ScheduleBatch,
        then: Callable[[Encode], None],
        report: Callable[[Encode], None] = lambda _encode: None,
    ) -> None:
        """Executes `batch`, even if the caller is cancelled meanwhile.

        Calls `then` in the worker thread with a function that encodes the result. The caller should
        encode in another thread, so that the next batch begins at once. For the same reason the
        batch is decoded in the caller's thread. Before, calls `report` with each part of the result
        if `Work.reports_parts` says so, in any thread; it must not raise.
        """
        received = _ReceivedBatch(time.monotonic_ns())
        self._unanswered.append(received)
        decoded = decode_batch(batch)
        watch: RunWatch | None = None
        if batch.work.reports_parts:
            watch = partial(self._goes_on, received, PartReports(decoded.identity, report))

        def deliver(encode: Encode) -> None:
            self._unanswered.popleft()
            try:
                then(encode)
            except Exception:
                # The receiver of this result is gone; the receivers of other results are not
                # affected.
                _log.exception("step_result_undeliverable step_id=%d", batch.step_id)

        def begin() -> None:
            queue_us = (time.monotonic_ns() - received.received_ns) // 1000
            try:
                running = self._step_executor.begin(
                    decoded,
                    lambda answer: deliver(lambda: _encode(batch, answer)),
                    queue_us,
                    watch,
                )
            except Exception:
                # A bug of ours. Each batch must get its result even so, or the scheduler would
                # wait.
                _log.exception("step_unanswerable step_id=%d", batch.step_id)
                deliver(lambda: encode_internal_error(batch))
            else:
                if running is not None:
                    self._wait_for(running)

        self._jobs.put(begin)

    def _goes_on(self, received: _ReceivedBatch, parts: PartReports, runs: TokenRuns) -> bool:
        """Reports `runs` of a step, and returns True, unless other work waits for its end."""
        is_alone = len(self._unanswered) == 1 and self._unanswered[0] is received
        if not is_alone or not self._jobs.empty():
            return False
        parts.report(runs)
        return True

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """Adopts the epoch after the batches that were submitted before."""
        self._jobs.put(lambda: self._step_executor.adopt_scheduler_epoch(scheduler_epoch))

    def begin_life(self, executor_epoch: int) -> None:
        """Begins another life after the batches that were submitted before."""
        self._jobs.put(lambda: self._step_executor.begin_life(executor_epoch))

    def finish(self) -> None:
        """Finishes all submitted batches and ends the threads; returns when both are done."""
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
                # Later jobs do not depend on this one.
                _log.exception("step_worker_job_broken")

    def _wait_for(self, running: RunningStep) -> None:
        """Has the second thread wait for the step, and the first one finish it in turn."""
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
