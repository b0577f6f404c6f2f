"""The step contract without any network: batches in, results out."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Literal

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.stranger.columns import Refusal, f32, i32
from tests.contract.stranger.constraints import allowed_next, first_allowed
from tests.contract.stranger.kv_emulation import KvEmulation, RowInput
from tests.contract.stranger.rows import Row
from tests.contract.stranger.truth import Score, sample, score
from tests.contract.stranger.validation import Plan, Validator, WorkRow

_NUM_WAITS = 2
_HOUR_NS = 3600 * 10**9


@dataclass(slots=True)
class Faults:
    """Faults that happen once each, at the first fitting step with at least this id."""

    need_snapshot_at: int | None = None
    fail_step_at: int | None = None
    fail_row_at: int | None = None
    # The batch is executed and its result stored, but the stream ends without an answer.
    cut_at: int | None = None
    # The stream ends and the batch was never received.
    lose_at: int | None = None
    # The process dies before executing the batch and starts anew on the same port.
    restart_at: int | None = None
    # What reading undefined contents looks like.
    undefined_reads: Literal["garbage", "invalid_logits"] = "invalid_logits"

    @property
    def are_left(self) -> bool:
        """Whether a fault has not happened yet."""
        return any(isinstance(getattr(self, field.name), int) for field in fields(self))


@dataclass(slots=True)
class _ScoreColumns:
    """Collects Logprobs."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def add(self, row_index: int, position: int, value: Score) -> None:
        self.rows.append(row_index)
        self.positions.append(position)
        self.scores.append(value)

    def message(self) -> pb.Logprobs:
        offsets = [0]
        for value in self.scores:
            offsets.append(offsets[-1] + len(value.top))
        top = [pair for value in self.scores for pair in value.top]
        return pb.Logprobs(
            row_indexes=i32(self.rows),
            positions=i32(self.positions),
            token_ids=i32(value.token_id for value in self.scores),
            logprobs=f32(value.logprob for value in self.scores),
            ranks=i32(value.rank for value in self.scores),
            top_offsets=i32(offsets),
            top_token_ids=i32(token_id for token_id, _ in top),
            top_logprobs=f32(logprob for _, logprob in top),
        )


class Engine:
    """Row table, stored results, KV cache; one call of `handle` a batch."""

    def __init__(self, info: pb.ExecutorInfo, faults: Faults) -> None:
        self._info = info
        self._faults = faults
        self._validator = Validator(info)
        self._kv = KvEmulation(info.block_size_tokens, info.num_device_blocks, info.num_host_blocks)
        self._rows: dict[int, Row] = {}
        self._stored: OrderedDict[int, pb.StepResult] = OrderedDict()
        self.scheduler_epoch: int | None = None
        self.last_applied: int | None = None
        # What a correct scheduler never causes: reads of what was not written, and refusals.
        self.violations: list[str] = []
        # Beyond the first of a row in a step.
        self.num_tokens_more = 0

    def adopt(self, scheduler_epoch: int) -> None:
        """Rule b: forgets everything if `scheduler_epoch` is newer than any seen."""
        if self.scheduler_epoch is None or scheduler_epoch > self.scheduler_epoch:
            self.scheduler_epoch = scheduler_epoch
            self.last_applied = None
            self._rows = {}
            self._stored.clear()
            self._kv.undefine_everything()

    def handle(self, batch: pb.ScheduleBatch) -> pb.StepResult:
        """Answers one batch. Mutates the engine unless the answer is REFUSED or NEED_SNAPSHOT."""
        try:
            stored = self._identify(batch)
            if stored is not None:
                return stored
            if self._lacks_base(batch):
                return self._result(batch, pb.STEP_STATUS_NEED_SNAPSHOT)
            plan = self._validator.plan(batch, {} if self._is_newer(batch) else self._rows)
        except Refusal as refusal:
            self.violations.append(f"step {batch.step_id} refused: {refusal}")
            result = self._result(batch, pb.STEP_STATUS_REFUSED)
            result.error.reason = refusal.reason
            result.error.field = refusal.field
            result.error.message = refusal.message
            return result
        self.adopt(batch.scheduler_epoch)
        result = self._apply(batch, plan)
        self.last_applied = batch.step_id
        self._stored[batch.step_id] = result
        while len(self._stored) > self._info.limits.max_inflight_steps:
            self._stored.popitem(last=False)
        return result

    def _identify(self, batch: pb.ScheduleBatch) -> pb.StepResult | None:
        """Rules a, b, c: a stored result, or None to go on. Raises `Refusal`."""
        if batch.executor_epoch != self._info.executor_epoch:
            reason = pb.STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH
            raise Refusal(reason, "executor_epoch", f"{batch.executor_epoch}")
        if self.scheduler_epoch is not None and batch.scheduler_epoch < self.scheduler_epoch:
            reason = pb.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH
            raise Refusal(reason, "scheduler_epoch", f"{batch.scheduler_epoch}")
        if batch.scheduler_epoch > time.time_ns() + _HOUR_NS:
            reason = pb.STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH
            raise Refusal(reason, "scheduler_epoch", f"{batch.scheduler_epoch}")
        if self._is_newer(batch) or self.last_applied is None or batch.step_id > self.last_applied:
            return None
        if batch.step_id not in self._stored:
            reason = pb.STEP_ERROR_REASON_STALE_STEP
            raise Refusal(reason, "step_id", f"{batch.step_id} <= {self.last_applied}")
        return self._stored[batch.step_id]

    def _is_newer(self, batch: pb.ScheduleBatch) -> bool:
        """Whether its scheduler would be adopted with it."""
        return self.scheduler_epoch is None or batch.scheduler_epoch > self.scheduler_epoch

    def _lacks_base(self, batch: pb.ScheduleBatch) -> bool:
        """Rule d, or the fault that looks like it."""
        if not batch.HasField("base_step_id"):
            return False
        at = self._faults.need_snapshot_at
        if at is not None and batch.step_id >= at:
            self._faults.need_snapshot_at = None
            return True
        return self._is_newer(batch) or batch.base_step_id != self.last_applied

    def _result(self, batch: pb.ScheduleBatch, status: pb.StepStatus) -> pb.StepResult:
        return pb.StepResult(
            scheduler_epoch=batch.scheduler_epoch,
            executor_epoch=self._info.executor_epoch,
            step_id=batch.step_id,
            status=status,
        )

    def _apply(self, batch: pb.ScheduleBatch, plan: Plan) -> pb.StepResult:
        self._rows = plan.rows
        kv = self._kv
        kv.move(plan.swap_out, kv.device, kv.host)
        kv.move(plan.swap_in, kv.host, kv.device)
        kv.move(plan.copy, kv.device, kv.device)
        at = self._faults.fail_step_at
        if at is not None and batch.step_id >= at and plan.work:
            self._faults.fail_step_at = None
            self._undefine_step(plan)
            result = self._result(batch, pb.STEP_STATUS_FAILED)
            result.error.reason = pb.STEP_ERROR_REASON_OUT_OF_MEMORY
            result.error.message = "the emulated device is out of memory"
            return result
        return self._compute(batch, plan)

    def _undefine_step(self, plan: Plan) -> None:
        """FAILED: the contents of all blocks the step wrote are undefined."""
        device = {target for _, target in (*plan.swap_in, *plan.copy)}
        for work in plan.work:
            device |= self._kv.written_blocks(self._row_input(work, work.token_ids or [0]))
        for block in device:
            self._kv.undefine(self._kv.device[block])
        for _, target in plan.swap_out:
            self._kv.undefine(self._kv.host[target])

    def _row_input(
        self, work: WorkRow, token_ids: list[int], first_position: int | None = None
    ) -> RowInput:
        position = work.first_position if first_position is None else first_position
        return RowInput(work.row_id, self._rows[work.row_id].block_table, position, token_ids)

    def _compute(self, batch: pb.ScheduleBatch, plan: Plan) -> pb.StepResult:
        statuses: list[pb.RowStatus] = []
        inputs: list[RowInput] = []
        for work in plan.work:
            tokens, status = self._input_tokens(batch.step_id, work)
            at = self._rows[work.row_id].sampled_at.get(batch.step_id - work.steps_back)
            if at is not None and at > work.first_position:
                self.violations.append(f"step {batch.step_id}: {at} > {work.first_position}")
            inputs.append(self._row_input(work, tokens, at if work.steps_back else None))
            statuses.append(status)
        self._undefine_failed(inputs, statuses)
        good = pb.ROW_STATUS_OK
        self._kv.compute([r for r, s in zip(inputs, statuses, strict=True) if s == good])
        for index, row in enumerate(inputs):
            if statuses[index] == good and self._is_invalid(batch.step_id, row):
                statuses[index] = pb.ROW_STATUS_INVALID_LOGITS
        self._undefine_failed(inputs, statuses)
        return self._sample(batch, plan, inputs, statuses)

    def _input_tokens(self, step_id: int, work: WorkRow) -> tuple[list[int], pb.RowStatus]:
        at = self._faults.fail_row_at
        if at is not None and step_id >= at:
            self._faults.fail_row_at = None
            return work.token_ids or [0], pb.ROW_STATUS_FAILED
        if work.token_ids is not None:
            return work.token_ids, pb.ROW_STATUS_OK
        row = self._rows[work.row_id]
        token_id = row.sampled.get(step_id - work.steps_back)
        if token_id is None or token_id in row.sampling_params.stop_token_ids:
            return [0], pb.ROW_STATUS_INPUT_UNAVAILABLE
        return [token_id], pb.ROW_STATUS_OK

    def _is_invalid(self, step_id: int, row: RowInput) -> bool:
        if row.problem:
            self.violations.append(f"step {step_id} row {row.row_id}: {row.problem}")
            return True
        return row.read_undefined and self._faults.undefined_reads == "invalid_logits"

    def _undefine_failed(
        self, inputs: Sequence[RowInput], statuses: Sequence[pb.RowStatus]
    ) -> None:
        for row, status in zip(inputs, statuses, strict=True):
            if status != pb.ROW_STATUS_OK:
                for block in self._kv.written_blocks(row):
                    self._kv.undefine(self._kv.device[block])

    def _sample(
        self,
        batch: pb.ScheduleBatch,
        plan: Plan,
        inputs: Sequence[RowInput],
        statuses: list[pb.RowStatus],
    ) -> pb.StepResult:
        result = self._result(batch, pb.STEP_STATUS_OK)
        scores, prompt_scores = _ScoreColumns(), _ScoreColumns()
        runs: list[list[int]] = []
        for index, (work, row_input) in enumerate(zip(plan.work, inputs, strict=True)):
            runs.append([])
            if statuses[index] != pb.ROW_STATUS_OK:
                continue
            row = self._rows[work.row_id]
            self._score_prompt(index, row, row_input, prompt_scores)
            statuses[index] = self._judge(row, row_input) if work.samples else pb.ROW_STATUS_OK
            if work.samples and statuses[index] == pb.ROW_STATUS_OK:
                self._run(batch.step_id, index, work, row_input, scores, runs[index])
                row.sampled[batch.step_id] = runs[index][-1]
                row.sampled_at[batch.step_id] = row_input.last_position + len(runs[index])
        _tell_statuses(result, statuses)
        if any(len(run) > 1 for run in runs):
            result.sampled_token_ids = i32(token for run in runs for token in run)
            result.sampled_offsets = i32([0, *accumulate(map(len, runs))])
        else:
            result.sampled_token_ids = i32(run[0] if run else -1 for run in runs)
        # Without it nobody knows what several tokens take.
        result.timings.forward_us = 10
        if scores.rows:
            result.logprobs.CopyFrom(scores.message())
        if prompt_scores.rows:
            result.prompt_logprobs.CopyFrom(prompt_scores.message())
        return result

    def _run(
        self,
        step_id: int,
        index: int,
        work: WorkRow,
        row_input: RowInput,
        scores: _ScoreColumns,
        run: list[int],
    ) -> None:
        """The tokens of a row; of some steps fewer than are allowed, as an executor may."""
        row, drafts, num_left = self._rows[work.row_id], list(work.drafts), work.num_run_on
        num_left = min(num_left, (step_id + index) % 7)
        current = row_input
        while True:
            run.append(self._sample_row(index, row, current, scores))
            if row.history:
                row.history.append(run[-1])
            if run[-1] in row.sampling_params.stop_token_ids:
                break
            if drafts and drafts[0] == run[-1]:
                drafts.pop(0)
            elif num_left > 0:
                drafts, num_left = [], num_left - 1
            else:
                break
            current = self._row_input(work, run[-1:], current.last_position + 1)
            self._kv.compute([current])
            self.num_tokens_more += 1
            assert not self._is_invalid(step_id, current), "what it reads is its own"
        # What it was allowed to write.
        first, most = row_input.last_position + 1, len(work.drafts) + work.num_run_on
        self._kv.undefine_slots(row_input, range(first + len(run) - 1, first + most))

    def _judge(self, row: Row, row_input: RowInput) -> pb.RowStatus:
        """Whether the row can be sampled: its grammar is compiled anew for each row."""
        if not row.sampling_params.HasField("grammar"):
            return pb.ROW_STATUS_OK
        if len(row.waited) < _NUM_WAITS and not row.sampled:
            row.waited.append(row_input.last_position)
            return pb.ROW_STATUS_NOT_SAMPLED
        is_valid = self._allowed(row, row_input) is not None
        return pb.ROW_STATUS_OK if is_valid else pb.ROW_STATUS_GRAMMAR_INVALID

    def _allowed(self, row: Row, row_input: RowInput) -> set[int] | None:
        output = row.history[row.num_prompt_tokens : row_input.last_position + 1]
        eos = self._info.model.eos_token_ids
        return allowed_next(row.sampling_params.grammar, output, eos)

    def _sample_row(self, index: int, row: Row, row_input: RowInput, scores: _ScoreColumns) -> int:
        vocab_size = self._info.model.vocab_size
        position = row_input.last_position + 1
        token_id = sample(row_input.chain, row.seed, row.temperature, position, vocab_size)
        params = row.sampling_params
        token_id = first_allowed(params, row.history[:position], token_id, vocab_size)
        if params.HasField("grammar"):
            token_id = min(self._allowed(row, row_input) or {token_id})
        assert token_id >= 0, "a scheduler asks for no token where none is allowed"
        if row.sampling_params.HasField("num_logprobs"):
            top = row.sampling_params.num_logprobs
            scores.add(index, position, score(row_input.chain, token_id, top, vocab_size))
        return token_id

    def _score_prompt(
        self, index: int, row: Row, row_input: RowInput, scores: _ScoreColumns
    ) -> None:
        if not row.sampling_params.HasField("num_prompt_logprobs"):
            return
        top = row.sampling_params.num_prompt_logprobs
        vocab_size = self._info.model.vocab_size
        for position in range(row_input.first_position, row_input.last_position + 1):
            slot = self._kv.slot(row_input, position)
            if position + 1 < row.num_prompt_tokens and slot is not None:
                token_id = row.history[position + 1]
                value = score(slot.chain, token_id, top, vocab_size)
                scores.add(index, position + 1, value)


def _tell_statuses(result: pb.StepResult, statuses: Sequence[pb.RowStatus]) -> None:
    if any(status != pb.ROW_STATUS_OK for status in statuses):
        result.row_statuses = bytes(statuses)
    for index, status in enumerate(statuses):
        if status != pb.ROW_STATUS_OK:
            result.row_errors.add(row_index=index, message=pb.RowStatus.Name(status))
