"""A scheduler core and an executor in one process, joined by real protobuf messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer
from executor_service.steps.executor_info import ExecutorInfo, ExecutorLimits, Feature, ModelInfo
from executor_service.steps.step import Runner
from executor_service.steps.step_executor import StepExecutor
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import PreemptionCause, StepEvents, StepPlan
from scheduler_service.scheduler.values.request import Request
from scheduler_service.step_codec import decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.engine_with_queue import EngineWithQueue

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
        self.scheduler = EngineWithQueue(config)
        self.executor = StepExecutor(executor_info(config, epoch), runner)
        self.epoch = epoch
        self.depth = depth
        self.preempt_at = preempt_at
        self.in_flight: deque[tuple[StepPlan, bytes]] = deque()
        self.delivered: dict[str, list[list[int]]] = {}
        self.finished: list[Request] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request, *, is_new: bool = True) -> None:
        """Gives a request to the core, new or from another executor."""
        request.client_key = request.arrival
        if is_new:
            self.scheduler.add(request)
        else:
            self.scheduler.readmit(request)
        self._requests[request.client_key] = request
        if is_new:
            self.delivered[request.request_id] = [[] for _ in range(request.params.num_sequences)]
        self._deliver(self.scheduler.take_ended())

    def fill(self) -> None:
        while len(self.in_flight) < self.depth:
            if self.scheduler.last_step_id + 1 in self.preempt_at and self.scheduler.num_running:
                youngest = self.scheduler.placement.rows.running[-1].request
                self.scheduler.placement.preempt(youngest, PreemptionCause.BLOCKS)
            plan = self.scheduler.schedule()
            if self.scheduler.ask_again_at_ns is not None and not self.in_flight:
                self.scheduler.tick(self.scheduler.ask_again_at_ns)
                plan = self.scheduler.schedule()
            self._deliver(self.scheduler.take_ended())
            if plan is None:
                return
            batch = encode_plan(plan, scheduler_epoch=SCHEDULER_EPOCH, executor_epoch=self.epoch)
            self.in_flight.append((plan, batch.data))

    def answer(self, alter: Callable[[pb.StepResult], None] | None = None) -> StepEvents:
        """Executes the oldest step in flight; `alter` may spoil its result."""
        plan, message = self.in_flight.popleft()
        answer = self.executor.execute(decode_batch(pb.ScheduleBatch.FromString(message)))
        result = encode_answer(answer)
        if alter is not None:
            alter(result)
        received = pb.StepResult.FromString(result.SerializeToString())
        outcome = decode_result(received, len(plan.work.row_ids))
        return self._deliver(self.scheduler.apply(outcome))

    def skip(self, status: pb.StepStatus) -> StepEvents:
        """Answers the oldest step in flight with `status`, and does not execute it."""
        plan, _ = self.in_flight.popleft()
        result = pb.StepResult(step_id=plan.step_id, status=status)
        outcome = decode_result(result, len(plan.work.row_ids))
        return self._deliver(self.scheduler.apply(outcome))

    def run(self, max_steps: int = 100_000) -> dict[str, list[int]]:
        """Runs until nothing is left; returns the tokens of each request's first sequence."""
        for _ in range(max_steps):
            self.fill()
            if not self.in_flight:
                return {name: tokens[0] for name, tokens in self.delivered.items()}
            self.answer()
        raise AssertionError(f"still running after {max_steps} steps")

    def _deliver(self, events: StepEvents) -> StepEvents:
        """Takes tokens as clients do."""
        for key, token_id in zip(
            events.client_keys.tolist(), events.token_ids.tolist(), strict=True
        ):
            self.delivered[self._requests[key].request_id][0].append(token_id)
        for event in events.tokens:
            tokens = self.delivered[event.sequence.request.request_id]
            tokens[event.sequence.index].append(event.token_id)
        for request in events.finished:
            if request.completions:
                self.delivered[request.request_id] = [c.token_ids for c in request.completions]
        self.finished += events.finished
        return events


def executor_info(config: SchedulerConfig, epoch: int) -> ExecutorInfo:
    """What an executor for `config` says of itself."""
    names = {feature.name for feature in config.features}
    return ExecutorInfo(
        executor_epoch=epoch,
        model=ModelInfo(
            "m",
            "d",
            "float32",
            "float32",
            config.vocab_size,
            config.max_model_len,
            tuple(config.eos_token_ids),
            sliding_window=config.sliding_window,
        ),
        block_size=config.block_size,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        block_bytes=1,
        limits=ExecutorLimits(
            max_num_rows=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_inflight_steps=4,
            max_adapters_per_step=config.max_adapters or None,
        ),
        features=frozenset(each for each in Feature if each.name in names),
    )


def output_token_ids(request: Request, index: int = 0) -> list[int]:
    """The output tokens of a request that is not running."""
    sequence = request.sequences[index]
    tokens: list[int] = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
    return tokens
