"""Executes batches: decides whether to run one, runs it, remembers what was answered.

Synchronous and deterministic; one thread at a time. Shape letters: R rows of the batch, K rows of
it whose input is available, T input tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from executor_service.batch import (
    INTERNAL_ERROR_MESSAGE,
    Batch,
    BatchContent,
    BatchRefused,
    StepAnswer,
    StepError,
    StepErrorReason,
    StepIdentity,
    StepRows,
    StepStatus,
    StepTimings,
)
from executor_service.batch_checks import check_batch
from executor_service.errors import ExecutorError, OutOfMemory
from executor_service.executor_info import ExecutorInfo
from executor_service.row_table import RowTable
from executor_service.step import Runner
from executor_service.step_input import prepare_step

_NO_TIMINGS = StepTimings()

_log = logging.getLogger(__name__)


class StepExecutor:
    """The step contract's semantics around a runner; see `ScheduleBatch` in the proto."""

    def __init__(self, info: ExecutorInfo, runner: Runner) -> None:
        self._info = info
        self._runner = runner
        self._scheduler_epoch = 0
        self._rows = RowTable(info.limits.max_num_rows, info.limits.max_inflight_steps)
        self._answers: OrderedDict[int, StepAnswer] = OrderedDict()
        # L of the identity rules; the row table is what step `_base_step_id` left.
        self._last_step_id: int | None = None
        self._base_step_id: int | None = None

    def adopt_scheduler_epoch(self, scheduler_epoch: int) -> None:
        """Forgets everything said by older schedulers, if `scheduler_epoch` is a newer one."""
        if scheduler_epoch > self._scheduler_epoch:
            _log.info("scheduler_epoch_adopted scheduler_epoch=%d", scheduler_epoch)
            self._scheduler_epoch = scheduler_epoch
            self._rows.clear()
            self._answers.clear()
            self._last_step_id = self._base_step_id = None

    def execute(self, batch: Batch, queue_us: int = 0) -> StepAnswer:
        """Answers `batch`; raises nothing. `queue_us`: how long it waited, for its timings."""
        identity = batch.identity
        try:
            answer = self._answer_by_identity(identity)
            if answer is None:
                answer = self._run(identity, self._checked_content(batch), queue_us)
                self._store(answer, base_step_id=answer.step_id)
        except BatchRefused as refusal:
            answer = self._refuse(identity, refusal.error)
        except Exception:
            # A bug of ours. How far it got is unknown, so no delta may build on this step.
            _log.exception("step_broken step_id=%d", identity.step_id)
            error = StepError(StepErrorReason.INTERNAL, "", INTERNAL_ERROR_MESSAGE)
            answer = self._answer(identity, StepStatus.FAILED, error=error)
            self._store(answer, base_step_id=None)
        return answer

    # -- identity ------------------------------------------------------------------------------

    def _answer_by_identity(self, identity: StepIdentity) -> StepAnswer | None:
        """Identity rules a to d; None: the batch is taken. Raises BatchRefused."""
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
        self.adopt_scheduler_epoch(identity.scheduler_epoch)
        step_id, last_step_id = identity.step_id, self._last_step_id
        if last_step_id is not None and step_id <= last_step_id:
            if step_id in self._answers:
                return self._answers[step_id]
            raise BatchRefused(
                StepErrorReason.STALE_STEP,
                "step_id",
                f"{step_id}; allowed: above {last_step_id}, or one of the stored"
                f" {list(self._answers)}",
            )
        if identity.base_step_id is not None and identity.base_step_id != self._base_step_id:
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
        check_batch(batch.content, is_snapshot, self._rows, self._info)
        return batch.content

    # -- execution -----------------------------------------------------------------------------

    def _run(self, identity: StepIdentity, content: BatchContent, queue_us: int) -> StepAnswer:
        """Changes the rows, computes and samples. Raises only what is a bug of ours."""
        self._change_rows(content, is_snapshot=identity.base_step_id is None)
        prepared = prepare_step(identity.step_id, content, self._rows)
        self._rows.forget_encoder_tokens(content.work.row_ids)
        try:
            output = self._runner.execute(prepared.step)
        except Exception as error:
            _log.exception("step_failed step_id=%d", identity.step_id)
            timings = StepTimings(queue_us)
            return self._answer(
                identity, StepStatus.FAILED, error=_describe(error), timings=timings
            )
        rows = prepared.merge(output)
        self._rows.record_sampled(content.work.row_ids, identity.step_id, rows.sampled_token_ids)
        timings = StepTimings(queue_us, output.move_us, output.forward_us, output.sample_us)
        return self._answer(identity, StepStatus.OK, rows=rows, timings=timings)

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
        rows: StepRows | None = None,
        timings: StepTimings = _NO_TIMINGS,
    ) -> StepAnswer:
        return StepAnswer(
            identity.scheduler_epoch,
            self._info.executor_epoch,
            identity.step_id,
            status,
            error,
            rows,
            timings,
        )

    def _store(self, answer: StepAnswer, base_step_id: int | None) -> None:
        """Remembers the answer of a step that was applied; it becomes L of the identity rules."""
        self._last_step_id = max(answer.step_id, self._last_step_id or answer.step_id)
        self._base_step_id = base_step_id
        self._answers[answer.step_id] = answer
        while len(self._answers) > self._info.limits.max_inflight_steps:
            self._answers.popitem(last=False)


def _describe(error: Exception) -> StepError:
    """What a runner's error means. Only texts that are made for people leave the process."""
    is_out_of_memory = isinstance(error, (OutOfMemory, MemoryError)) or isinstance(
        error.__cause__, OutOfMemory
    )
    reason = StepErrorReason.OUT_OF_MEMORY if is_out_of_memory else StepErrorReason.INTERNAL
    message = str(error) if isinstance(error, ExecutorError) else INTERNAL_ERROR_MESSAGE
    return StepError(reason, "", message)
