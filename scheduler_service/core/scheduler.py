"""The scheduler of one executor: `schedule()` decides a step, `apply()` learns from its result.

Deterministic: no I/O, no clock, no randomness. There is no prefill phase and no decode phase: each
step a sequence catches up from `num_computed` to `num_tokens` under the token budget. Steps are
pipelined: a token that a step in flight samples is *promised*, and the next step may build on it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from scheduler_service.core.admission import check_request
from scheduler_service.core.block_manager import Allocation, BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import (
    ContractBroken,
    RowStatus,
    StepEvents,
    StepOutcome,
    StepPlan,
    StepStatus,
    TableWrite,
)
from scheduler_service.core.policy import choose_victim, pick_running
from scheduler_service.core.request import FinishReason, Request, Sequence, SequenceStatus
from scheduler_service.core.row_columns import Int32Array, RowColumns
from scheduler_service.core.waiting_queue import WaitingQueue
from splitserve_rpc.domain_error import DomainError

MAX_FRUITLESS_LOSSES = 8
QUEUE_FULL_RETRY_S = 1.0


class Scheduler:
    """Waiting and running requests of one executor.

    `last_step_id` is the latest step that this life of the executor was ever sent; steps are
    numbered on from it.
    """

    def __init__(self, config: SchedulerConfig, last_step_id: int = 0) -> None:
        self._config = config
        self._blocks = BlockManager(config.num_device_blocks, config.block_size)
        self._rows = RowColumns(config.max_num_seqs)
        self._waiting = WaitingQueue()
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._removed_row_ids: list[int] = []
        self._last_planned_step_id = last_step_id
        self._last_answered_step_id = last_step_id
        self._needs_snapshot = True
        self.num_steps = 0
        self.num_preemptions = 0

    # -- what it holds -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return len(self._waiting)

    @property
    def is_queue_full(self) -> bool:
        """Whether `add` refuses whatever comes."""
        return len(self._waiting) >= self._config.max_num_waiting

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._rows)

    @property
    def num_free_blocks(self) -> int:
        """Device blocks nobody refers to."""
        return self._blocks.pool.num_free

    @property
    def num_in_flight(self) -> int:
        """Steps without a result."""
        return len(self._in_flight)

    @property
    def oldest_step_in_flight(self) -> int | None:
        """The step whose result comes next."""
        return self._in_flight[0].step_id if self._in_flight else None

    @property
    def last_step_id(self) -> int:
        """The latest step planned."""
        return self._last_planned_step_id

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of all unfinished requests; the load a router compares."""
        return sum(len(request.sequence.token_ids) for request in self._requests.values())

    # -- events in -----------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises DomainError if `request` can never run here."""
        check_request(request, self._config)

    def add(self, request: Request) -> None:
        """Takes a new request. Raises DomainError if it can never run, or if the queue is full.

        A request that has all its tokens already (by resuming) is finished at once.
        """
        self.check(request)
        if self.is_queue_full:
            raise DomainError(
                "QUEUE_FULL",
                f"{len(self._waiting)} requests wait; allowed: {self._config.max_num_waiting}",
                retry_delay_s=QUEUE_FULL_RETRY_S,
            )
        self.readmit(request)

    def readmit(self, request: Request) -> None:
        """Takes a request that was accepted before, however long the queue is."""
        assert request.request_id not in self._requests, "request id in use"
        config, sequence = self._config, request.sequence
        eos_token_ids = frozenset() if request.params.ignore_eos else config.eos_token_ids
        request.stop_token_ids = request.params.stop_token_ids | eos_token_ids
        request.stop_len = config.max_len
        if request.params.max_tokens is not None:
            by_length = sequence.num_prompt_tokens + request.params.max_tokens
            request.stop_len = min(by_length, config.max_len)
        self._requests[request.request_id] = request
        self._waiting.push(request)
        if sequence.num_output_tokens > 0:
            self._finish_if_stopped(sequence, sequence.token_ids[-1])

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is; None if there is no such request."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORTED)
        return request

    def evacuate(self) -> list[Request]:
        """The executor is lost: returns all requests, ready for `readmit` elsewhere.

        Their tokens are kept, all KV is forgotten; this scheduler is of no further use. A request
        that was lost too often without a new token in between is returned finished, with an error.
        """
        requests = list(self._requests.values())
        for sequence in list(self._rows.by_arrival):
            self._lose(sequence)
        for request in self._waiting:
            request.sequence.num_promised = 0
        self._requests.clear()
        return requests

    # -- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Decides the next step; None if there is nothing to compute now."""
        if self._needs_snapshot and self._in_flight:
            return None
        table_writes = self._grow_full_rows()
        budget = self._config.max_num_batched_tokens
        row_ids, num_new_tokens = pick_running(self._rows, budget)
        admitted, chunks = self._admit(budget - int(num_new_tokens.sum()))
        if admitted:
            new_ids = np.array([s.row_id for s in admitted], np.int32)
            row_ids = np.concatenate([row_ids, new_ids])
            num_new_tokens = np.concatenate([num_new_tokens, np.array(chunks, np.int32)])
        if len(row_ids) == 0:
            return None
        return self._plan(row_ids, num_new_tokens, admitted, table_writes)

    def apply(self, outcome: StepOutcome) -> StepEvents:
        """Learns from a result; results come in the order of the steps. Raises ContractBroken."""
        if not self._in_flight or self._in_flight[0].step_id != outcome.step_id:
            raise ContractBroken(f"a result for step {outcome.step_id}, which is not expected")
        plan = self._in_flight.popleft()
        if plan.base_step_id is None and outcome.status is StepStatus.NEED_SNAPSHOT:
            raise ContractBroken(f"step {plan.step_id} was a snapshot, and it wants a snapshot")
        self._last_answered_step_id = plan.step_id
        self.num_steps += 1
        self._blocks.step_answered(plan.step_id)
        events = StepEvents()
        if outcome.status is StepStatus.OK:
            self._apply_rows(plan, outcome, events)
        else:
            self._apply_failure(plan, outcome, events)
        return events

    # -- parts of schedule ---------------------------------------------------------------------

    def _grow_full_rows(self) -> list[TableWrite]:
        """Gives a block to every row that needs one, preempting the youngest where none is free."""
        writes = []
        for row_id in self._rows.full_rows():
            sequence = self._rows.sequences[row_id]
            # A row may have been preempted for an older one.
            if sequence is not None and self._append_block(sequence):
                self._rows.num_slots[row_id] += self._config.block_size
                table = sequence.block_table
                writes.append(TableWrite(row_id, len(table) - 1, table[-1:]))
        return writes

    def _append_block(self, sequence: Sequence) -> bool:
        while not self._blocks.append_block(sequence):
            if self._blocks.has_deferred:
                return False  # blocks are on their way: the row skips this step
            if self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        victim = choose_victim(self._rows)
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        self._back_to_waiting(victim)
        return victim

    def _admit(self, budget: int) -> tuple[list[Sequence], list[int]]:
        """Moves requests from waiting to running while they fit; the last may get a chunk only."""
        admitted: list[Sequence] = []
        chunks: list[int] = []
        while budget > 0 and not self._rows.is_full:
            request = self._waiting.peek()
            # A preempted sequence whose tokens are still being sampled waits for them.
            if request is None or request.sequence.num_promised > 0:
                break
            sequence = request.sequence
            allocation = self._blocks.can_allocate(sequence, others_run=len(self._rows) > 0)
            if allocation is not Allocation.OK:
                break
            self._waiting.pop()
            self._blocks.allocate(sequence)
            self._rows.add(sequence, len(sequence.block_table) * self._config.block_size)
            admitted.append(sequence)
            chunks.append(min(budget, len(sequence.token_ids)))
            budget -= chunks[-1]
        return admitted, chunks

    def _plan(
        self,
        row_ids: Int32Array,
        num_new_tokens: Int32Array,
        admitted: list[Sequence],
        table_writes: list[TableWrite],
    ) -> StepPlan:
        step_id = self._last_planned_step_id + 1
        base_step_id: int | None = self._last_planned_step_id
        removed_row_ids, self._removed_row_ids = self._removed_row_ids, []
        if self._needs_snapshot:
            self._rows.forget_samples()
            admitted, table_writes, removed_row_ids = list(self._rows.by_arrival), [], []
            base_step_id, self._needs_snapshot = None, False
        work = self._rows.plan_work(row_ids, num_new_tokens, step_id)
        plan = StepPlan(step_id, base_step_id, removed_row_ids, admitted, table_writes, work)
        self._last_planned_step_id = step_id
        self._in_flight.append(plan)
        return plan

    # -- parts of apply ------------------------------------------------------------------------

    def _apply_rows(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        samples = plan.work.samples.tolist()
        for index, sequence in enumerate(plan.work.sequences):
            if sequence is None or sequence.is_finished:
                continue
            if outcome.row_statuses and outcome.row_statuses[index] != RowStatus.OK:
                self._apply_row_failure(sequence, outcome, index, events)
                continue
            if index in outcome.prompt_logprobs:
                self._take_prompt_logprobs(sequence, outcome, index, events)
            if samples[index]:
                if index in outcome.logprobs:
                    events.logprobs[len(events.requests)] = outcome.logprobs[index]
                self._take_token(sequence, outcome.token_ids[index], events)

    def _take_token(self, sequence: Sequence, token_id: int, events: StepEvents) -> None:
        request = sequence.request
        if not 0 <= token_id < self._config.vocab_size:
            raise ContractBroken(f"sampled token {token_id} is outside the vocabulary")
        sequence.token_ids.append(token_id)
        if sequence.status is SequenceStatus.WAITING:
            sequence.num_promised -= 1
        if request.num_fruitless_losses:
            request.num_fruitless_losses = 0
        events.requests.append(request)
        events.token_ids.append(token_id)
        if self._finish_if_stopped(sequence, token_id):
            events.finished.append(request)

    def _take_prompt_logprobs(
        self, sequence: Sequence, outcome: StepOutcome, index: int, events: StepEvents
    ) -> None:
        # After a recompute the first of them were sent before.
        request = sequence.request
        scored = [
            token
            for token in outcome.prompt_logprobs[index]
            if token.position > request.num_prompt_logprobs_sent
        ]
        if scored:
            request.num_prompt_logprobs_sent += len(scored)
            events.prompt_logprobs.append((request, scored))

    def _apply_row_failure(
        self, sequence: Sequence, outcome: StepOutcome, index: int, events: StepEvents
    ) -> None:
        assert outcome.row_statuses is not None
        status = RowStatus(outcome.row_statuses[index])
        if status is RowStatus.INPUT_UNAVAILABLE:
            self._lose(sequence)
        else:
            reason = "INVALID_LOGITS" if status is RowStatus.INVALID_LOGITS else "ROW_FAILED"
            message = outcome.row_errors.get(index, "the executor could not compute this request")
            self._finish(sequence.request, FinishReason.ERROR, error=(reason, message))
        if sequence.is_finished:
            events.finished.append(sequence.request)

    def _apply_failure(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        """A step without tokens: its sequences are computed again, from their tokens."""
        self._needs_snapshot |= outcome.status is not StepStatus.FAILED
        for sequence in plan.work.sequences:
            if sequence is None or sequence.is_finished:
                continue
            if outcome.status is StepStatus.NEED_SNAPSHOT:
                self._recompute(sequence)
            else:
                self._lose(sequence)
            if sequence.is_finished:
                events.finished.append(sequence.request)

    # -- transitions ---------------------------------------------------------------------------

    def _lose(self, sequence: Sequence) -> None:
        """Its step or executor was lost: computed again, unless this happens over and over."""
        request = sequence.request
        request.num_fruitless_losses += 1
        if request.num_fruitless_losses < MAX_FRUITLESS_LOSSES:
            self._recompute(sequence)
            return
        message = f"lost {request.num_fruitless_losses} times in a row without a new token"
        self._finish(request, FinishReason.ERROR, error=("EXECUTOR_LOST_REPEATEDLY", message))

    def _recompute(self, sequence: Sequence) -> None:
        """Forgets all KV of `sequence` and what steps in flight promise it."""
        for plan in self._in_flight:
            if sequence in plan.work.sequences:
                plan.work.sequences[plan.work.sequences.index(sequence)] = None
        if sequence.status is SequenceStatus.RUNNING:
            self._back_to_waiting(sequence)
        sequence.num_promised = 0

    def _back_to_waiting(self, sequence: Sequence) -> None:
        """Takes row and blocks; results of steps in flight stay valid."""
        self._vacate(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.push(sequence.request)

    def _vacate(self, sequence: Sequence) -> None:
        self._removed_row_ids.append(self._rows.remove(sequence))
        self._blocks.release(sequence, self._last_answered_step_id)

    def _finish_if_stopped(self, sequence: Sequence, token_id: int) -> bool:
        """Ends the request if `token_id`, its last token, ends it."""
        request, num_tokens = sequence.request, len(sequence.token_ids)
        if token_id in request.stop_token_ids:
            request.stop_token_id = token_id
            self._finish(request, FinishReason.STOP)
        elif num_tokens >= request.stop_len:
            max_tokens = request.params.max_tokens
            by_length = max_tokens is not None and sequence.num_output_tokens >= max_tokens
            reason = FinishReason.LENGTH if by_length else FinishReason.MODEL_LENGTH
            self._finish(request, reason)
        return request.is_finished

    def _finish(
        self, request: Request, reason: FinishReason, error: tuple[str, str] | None = None
    ) -> None:
        request.finish_reason, request.error = reason, error
        del self._requests[request.request_id]
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._vacate(sequence)
            elif sequence.status is SequenceStatus.WAITING:
                self._waiting.remove(request)
            sequence.status = SequenceStatus.FINISHED
