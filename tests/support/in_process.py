"""A scheduler core and an executor in one process, joined by real protobuf messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from executor_service.codec import decode_batch, encode_answer
from executor_service.executor_info import ExecutorInfo, ExecutorLimits, ModelInfo
from executor_service.step import Runner
from executor_service.step_executor import StepExecutor
from scheduler_service.codec import decode_result, encode_plan
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from splitserve.executor.v1 import executor_pb2 as pb

SCHEDULER_EPOCH = 7


class InProcessEngine:
    """The engine loop without gRPC: up to `depth` steps are encoded before one is executed.

    `preempt_at`: numbers of steps before which the youngest sequence is preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        epoch: int,
        depth: int,
        preempt_at: frozenset[int] = frozenset(),
    ) -> None:
        self.scheduler = Scheduler(config)
        self.executor = StepExecutor(_executor_info(config, epoch), runner)
        self.epoch = epoch
        self.depth = depth
        self.preempt_at = preempt_at
        self.in_flight: deque[tuple[bytes, int]] = deque()

    def fill(self) -> None:
        while len(self.in_flight) < self.depth:
            if self.scheduler.last_step_id + 1 in self.preempt_at and self.scheduler.num_running:
                self.scheduler._preempt()
            plan = self.scheduler.schedule()
            if plan is None:
                return
            batch = encode_plan(plan, scheduler_epoch=SCHEDULER_EPOCH, executor_epoch=self.epoch)
            self.in_flight.append((batch.SerializeToString(), len(plan.work.row_ids)))

    def answer(self, alter: Callable[[pb.StepResult], None] | None = None) -> StepEvents:
        """Executes the oldest step in flight; `alter` may spoil its result."""
        message, num_rows = self.in_flight.popleft()
        answer = self.executor.execute(decode_batch(pb.ScheduleBatch.FromString(message)))
        result = encode_answer(answer)
        if alter is not None:
            alter(result)
        received = pb.StepResult.FromString(result.SerializeToString())
        return self.scheduler.apply(decode_result(received, num_rows))

    def skip(self, status: pb.StepStatus) -> StepEvents:
        """Answers the oldest step in flight with `status`, and does not execute it."""
        message, num_rows = self.in_flight.popleft()
        batch = pb.ScheduleBatch.FromString(message)
        result = pb.StepResult(step_id=batch.step_id, status=status)
        return self.scheduler.apply(decode_result(result, num_rows))

    def run(self, max_steps: int = 100_000) -> dict[str, list[int]]:
        """Runs until nothing is left; returns the tokens delivered for each request."""
        delivered: dict[str, list[int]] = {}
        for _ in range(max_steps):
            self.fill()
            if not self.in_flight:
                return delivered
            events = self.answer()
            for request, token_id in zip(events.requests, events.token_ids, strict=True):
                delivered.setdefault(request.request_id, []).append(token_id)
        raise AssertionError(f"still running after {max_steps} steps")


def _executor_info(config: SchedulerConfig, epoch: int) -> ExecutorInfo:
    return ExecutorInfo(
        executor_epoch=epoch,
        model=ModelInfo("m", "d", "float32", "float32", config.vocab_size, config.max_model_len),
        block_size=config.block_size,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=0,
        block_bytes=1,
        limits=ExecutorLimits(
            max_num_rows=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_inflight_steps=4,
        ),
    )


def output_token_ids(request: Request) -> list[int]:
    """The output tokens of a request."""
    return request.sequence.token_ids[request.sequence.num_prompt_tokens :]
