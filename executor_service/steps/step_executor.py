"""Execution of batches: identity rules, begin and finish of steps, and stored answers.

Synchronous and deterministic; one thread at a time. A step begins when its batch is accepted, and
is finished in order, perhaps after later steps have begun. Later steps see its row changes at once,
and await the tokens that it samples.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from executor_service.errors import ExecutorError, OutOfMemory
from executor_service.steps.batch import (
    INTERNAL_ERROR_MESSAGE,
    Batch,
    BatchContent,
    BatchRefused,
    StepAnswer,
    StepError,
    StepErrorReason,
    StepIdentity,
    StepStatus,
)
from executor_service.steps.batch_checks import check_batch
from executor_service.steps.executor_info import ExecutorInfo, steady_clock
from executor_service.steps.row_table import RowTable
from executor_service.steps.sampling_params import RowGrammars
from executor_service.steps.step import (
    FailedStep,
    Int32Array,
    PendingStep,
    Runner,
    RunWatch,
    StepOutput,
)
from executor_service.steps.step_input import PreparedStep, prepare_step

# Allowed difference between the clocks of two machines.
MAX_CLOCK_SKEW_NS = 3600 * 10**9
_BUG = StepError(StepErrorReason.INTERNAL, "", INTERNAL_ERROR_MESSAGE)

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningStep:
    """Step whose batch was accepted. `prepared`: None if the step failed to begin."""

    identity: StepIdentity
    row_ids: Int32Array
    queue_us: int
    then: Callable[[StepAnswer], None]
    prepared: PreparedStep | None
    pending: PendingStep
    is_finished: bool = False


class StepExecutor:
    """Implements the step contract around a runner; see `ScheduleBatch` in the proto."""

    def __init__(
        self,
        info: ExecutorInfo,
        runner: Runner,
        now_ns: Callable[[], int] | None = None,
        grammars: RowGrammars | None = None,
    ) -> None:
        """Creates an executor without rows.

        `now_ns`: returns nanoseconds since 1970, like epochs; None for a `steady_clock`.
        `grammars`: follows the grammars of rows; None if `runner` does, or if the executor supports
        none.
        """
        self._info = info
        self._now_ns = now_ns or steady_clock()
        self._runner = runner
        self._scheduler_epoch = 0
        self._rows = RowTable(info.limits.max_num_rows, info.limits.max_inflight_steps, grammars)
        self._answers: OrderedDict[int, StepAnswer] = OrderedDict()
        self._running: deque[RunningStep] = deque()
        # The step L of the identity rules. The row table is in the state that step `_base_step_id`
        # left.
        self._last_step_id: int | None = None
        self._base_step_id: int | None = None

    @property
    def scheduler_epoch(self) -> int:
        """Newest epoch that was adopted, 0 for none."""
        return self._scheduler_epoch

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """Removes all state of older schedulers if `scheduler_epoch` is newer than the adopted.

        Ignores an epoch from the future.
        """
        if scheduler_epoch > self._scheduler_epoch and not self._is_future(scheduler_epoch):
            self.finish()
            _log.info("scheduler_epoch_adopted scheduler_epoch=%d", scheduler_epoch)
            self._forget(scheduler_epoch)

    def begin_life(self, executor_epoch: int) -> None:
        """Removes all state of all schedulers; the next scheduler may have any epoch."""
        self.finish()
        self._info = replace(self._info, executor_epoch=executor_epoch)
        self._forget(0)

    def _forget(self, scheduler_epoch: int) -> None:
        self._scheduler_epoch = scheduler_epoch
        self._rows.clear()
        self._answers.clear()
        self._last_step_id = self._base_step_id = None

    def _is_future(self, scheduler_epoch: int) -> bool:
        return scheduler_epoch > self._now_ns() + MAX_CLOCK_SKEW_NS

    def execute(self, batch: Batch, queue_us: int = 0) -> StepAnswer:
        """Answers `batch` after all batches before it. Raises nothing. `queue_us`: see `begin`."""
        answers: list[StepAnswer] = []
        self.begin(batch, answers.append, queue_us)
        self.finish()
        return answers[0]

    def begin(
        self,
        batch: Batch,
        then: Callable[[StepAnswer], None],
        queue_us: int = 0,
        watch: RunWatch | None = None,
    ) -> RunningStep | None:
        """Begins the step of `batch`, or answers the batch without a step. Raises nothing.

        `then` gets the answer, after the answers to all earlier batches: before `begin` returns or,
        if a step is returned, when that step is finished. It must not raise. `queue_us`: time that
        the batch waited. `watch`: see StepInput; it gets the tokens of all rows of the batch.
        """
        identity = batch.identity
        running: RunningStep | None = None
        try:
            answer = self._answer_by_identity(identity)
            if answer is None:
                content = self._checked_content(batch)
                self.adopt_scheduler_epoch(identity.scheduler_epoch)
                running = self._begin(identity, content, queue_us, then, watch)
        except BatchRefused as refusal:
            answer = self._refuse(identity, refusal.error)
        except Exception:
            # A bug of ours. The state of the rows is unknown, so no delta may build on this step.
            _log.exception("step_broken step_id=%d", identity.step_id)
            self.adopt_scheduler_epoch(identity.scheduler_epoch)
            self._apply(identity.step_id, base_step_id=None)
            self.finish()
            answer = self._answer(identity, StepStatus.FAILED, error=_BUG)
            self._store(answer)
        if running is not None:
            self._finish_what_is_done()
            return None if running.is_finished else running
        assert answer is not None, "a step that did not begin has an answer"
        self.finish()
        then(answer)
        return None

    def finish(self, last: RunningStep | None = None) -> None:
        """Waits for steps up to `last` (None: all), finishes them and completed later steps."""
        while self._running and not (last is not None and last.is_finished):
            self._finish_oldest()
        self._finish_what_is_done()

    # -- identity ------------------------------------------------------------------------------

    def _answer_by_identity(self, identity: StepIdentity) -> StepAnswer | None:
        """Applies identity rules a to d; None if the batch is accepted. Raises BatchRefused."""
        executor_epoch, newest_epoch = self._info.executor_epoch, self._scheduler_epoch
        if identity.executor_epoch != executor_epoch:
            raise BatchRefused(
                StepErrorReason.WRONG_EXECUTOR_EPOCH,
                "executor_epoch",
                f"{identity.executor_epoch}; allowed: {executor_epoch}",
            )
        if identity.scheduler_epoch < newest_epoch:
            raise BatchRefused(
                StepErrorReason.STALE_SCHEDULER_EPOCH,
                "scheduler_epoch",
                f"{identity.scheduler_epoch}; allowed: {newest_epoch} or newer",
            )
        step_id, last_step_id = identity.step_id, self._last_step_id
        base_step_id = self._base_step_id
        if identity.scheduler_epoch > newest_epoch:
            if self._is_future(identity.scheduler_epoch):
                raise BatchRefused(
                    StepErrorReason.FUTURE_SCHEDULER_EPOCH,
                    "scheduler_epoch",
                    f"{identity.scheduler_epoch}; allowed: at most an hour after {self._now_ns()}",
                )
            last_step_id = base_step_id = None
        if last_step_id is not None and step_id <= last_step_id:
            self.finish()
            if step_id in self._answers:
                return self._answers[step_id]
            raise BatchRefused(
                StepErrorReason.STALE_STEP,
                "step_id",
                f"{step_id}; allowed: above {last_step_id}, or one of the stored"
                f" results {list(self._answers)}",
            )
        if identity.base_step_id is not None and identity.base_step_id != base_step_id:
            return self._answer(identity, StepStatus.NEED_SNAPSHOT)
        return None

    def _checked_content(self, batch: Batch) -> BatchContent:
        if isinstance(batch.content, BatchRefused):
            raise batch.content
        identity = batch.identity
        if identity.step_id < 1:
            raise BatchRefused(
                StepErrorReason.MALFORMED, "step_id", f"{identity.step_id}; allowed: 1 or more"
            )
        is_snapshot = identity.base_step_id is None
        check_batch(batch.content, is_snapshot, self._rows, self._info, identity.step_id)
        return batch.content

    # -- execution -----------------------------------------------------------------------------

    def _begin(
        self,
        identity: StepIdentity,
        content: BatchContent,
        queue_us: int,
        then: Callable[[StepAnswer], None],
        watch: RunWatch | None,
    ) -> RunningStep:
        """Changes the rows and begins to compute. Only a bug of ours raises an error."""
        step_id, row_ids = identity.step_id, content.work.row_ids
        self._change_rows(content, is_snapshot=identity.base_step_id is None)
        prepared: PreparedStep | None = None
        pending: PendingStep
        try:
            prepared, pending = self._begin_computing(step_id, content, watch)
        except Exception as error:
            # Finished at once: the error may hold memory that the next step needs.
            self.finish()
            pending = FailedStep(error)
        else:
            prepared.expect(pending.num_more_tokens, self._rows)
        self._rows.forget_encoder_inputs(row_ids)
        self._apply(step_id, base_step_id=step_id)
        running = RunningStep(identity, row_ids, queue_us, then, prepared, pending)
        self._running.append(running)
        return running

    def _begin_computing(
        self, step_id: int, content: BatchContent, watch: RunWatch | None
    ) -> tuple[PreparedStep, PendingStep]:
        """Prepares the step and hands it to the runner.

        First finishes earlier steps if too many are in flight, if a row needs their sampled tokens,
        or if the runner asks for it.
        """
        if self._running and (
            step_id - self._running[0].identity.step_id >= self._info.limits.max_inflight_steps
            or self._rows.reads_output(content.work.row_ids)
        ):
            self.finish()
        oldest = self._running[0].identity.step_id if self._running else None
        prepared = prepare_step(step_id, content, self._rows, oldest)
        if watch is not None:
            prepared = prepared.watched_by(watch)
        pending = self._runner.begin(prepared.step)
        if pending is None:
            self.finish()
            prepared = prepare_step(step_id, content, self._rows)
            if watch is not None:
                prepared = prepared.watched_by(watch)
            pending = self._runner.begin(prepared.step)
            assert pending is not None, "all earlier steps are finished"
        return prepared, pending

    def _finish_what_is_done(self) -> None:
        while self._running and self._running[0].pending.is_done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        running = self._running.popleft()
        answer = self._finish_step(running)
        if answer.output is None and running.prepared is not None:
            # Records that no row sampled: later steps expected tokens of this step.
            nothing = np.full(len(running.row_ids), -1, np.int32)
            self._rows.record_sampled(running.row_ids, answer.step_id, nothing)
        self._store(answer)
        running.is_finished = True
        running.then(answer)

    def _finish_step(self, running: RunningStep) -> StepAnswer:
        identity = running.identity
        error = _BUG
        try:
            output = running.pending.finish()
        except Exception as raised:
            _log.exception("step_failed step_id=%d", identity.step_id)
            error = _describe(raised)
        else:
            try:
                return self._answer_output(running, output)
            except Exception:
                # A bug of ours; the state of the row table is unknown.
                _log.exception("step_broken step_id=%d", identity.step_id)
                self._base_step_id = None
        return self._answer(identity, StepStatus.FAILED, error=error, queue_us=running.queue_us)

    def _answer_output(self, running: RunningStep, output: StepOutput) -> StepAnswer:
        assert running.prepared is not None, "a computed step was prepared"
        identity = running.identity
        output = running.prepared.merge(output, self._rows)
        self._rows.record_sampled(
            running.row_ids, identity.step_id, output.sampled_token_ids, output.runs
        )
        return self._answer(identity, StepStatus.OK, output=output, queue_us=running.queue_us)

    def _change_rows(self, content: BatchContent, *, is_snapshot: bool) -> None:
        if is_snapshot:
            self._rows.clear()
        self._rows.remove(content.removed_row_ids)
        if content.new_rows is not None:
            self._rows.add(content.new_rows)
        if content.table_writes is not None:
            self._rows.write_tables(content.table_writes)

    # -- answers -------------------------------------------------------------------------------

    def _refuse(self, identity: StepIdentity, error: StepError) -> StepAnswer:
        _log.warning(
            "batch_refused step_id=%d reason=%s field=%s message=%r",
            identity.step_id,
            error.reason.name,
            error.field,
            error.message,
        )
        return self._answer(identity, StepStatus.REFUSED, error=error)

    def _answer(
        self,
        identity: StepIdentity,
        status: StepStatus,
        *,
        error: StepError | None = None,
        output: StepOutput | None = None,
        queue_us: int = 0,
    ) -> StepAnswer:
        return StepAnswer(
            identity.scheduler_epoch,
            self._info.executor_epoch,
            identity.step_id,
            status,
            error,
            output,
            queue_us,
        )

    def _apply(self, step_id: int, base_step_id: int | None) -> None:
        """Makes the step the step L of the identity rules."""
        self._last_step_id = max(step_id, self._last_step_id or step_id)
        self._base_step_id = base_step_id

    def _store(self, answer: StepAnswer) -> None:
        """Stores the answer of an applied step; drops the oldest beyond max_inflight_steps."""
        self._answers[answer.step_id] = answer
        while len(self._answers) > self._info.limits.max_inflight_steps:
            self._answers.popitem(last=False)


def _describe(error: Exception) -> StepError:
    """Returns the StepError for a runner's error. Only messages made for people are passed on."""
    is_out_of_memory = isinstance(error, (OutOfMemory, MemoryError)) or isinstance(
        error.__cause__, OutOfMemory
    )
    reason = StepErrorReason.OUT_OF_MEMORY if is_out_of_memory else StepErrorReason.INTERNAL
    message = str(error) if isinstance(error, ExecutorError) else INTERNAL_ERROR_MESSAGE
    return StepError(reason, "", message)
