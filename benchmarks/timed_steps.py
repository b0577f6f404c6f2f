"""Steps as a scheduler sends them, executed in this process, and where their time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.cpu_limits import StepSize
from executor_service.engine_loader import LoadedEngine
from executor_service.runner import ModelRunner
from executor_service.service import decode_batch, encode_answer
from executor_service.steps import ExecutorInfo, StepExecutor
from scheduler_service.scheduler.values import (
    Request,
    SamplingParams,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.step_codec import encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_kernels.cpu import STEP_PARTS, load_library
from tests.support.core.driver import EngineWithQueue

_TOKEN_ID = 5
_NUM_WARM_UPS = 2


class TimedExecutor:
    """The executor's side of steps, taken apart. The native decoder must run the model."""

    def __init__(self, engine: LoadedEngine) -> None:
        """Writes all of the KV pools of `engine`."""
        self._info = engine.info
        self._executor = StepExecutor(engine.info, engine.runner)
        self._scheduler_epoch = 0
        self._part_ns = torch.zeros(len(STEP_PARTS), dtype=torch.int64)
        load_library().part_ns = self._part_ns
        # Pages that were never written are all the same one, which no cache lets go of.
        assert isinstance(engine.runner, ModelRunner), "no draft model"
        for pool in (*engine.runner.cache.key_pools, *engine.runner.cache.value_pools):
            pool.fill_(0.5)

    def time_steps(self, size: StepSize, num_steps: int) -> dict[str, float]:
        """Milliseconds of each part, and last of the whole `step`; medians of `num_steps` steps."""
        self._scheduler_epoch += 1
        epochs = {
            "scheduler_epoch": self._scheduler_epoch,
            "executor_epoch": self._info.executor_epoch,
        }
        times = [
            self._execute(encode_plan(plan, **epochs).data)
            for plan in _plans(self._info, size, num_steps + _NUM_WARM_UPS)
        ]
        measured = times[_NUM_WARM_UPS:]
        return {part: statistics.median(step[part] for step in measured) for part in times[0]}

    def _execute(self, batch: bytes) -> dict[str, float]:
        self._part_ns.zero_()
        started_s = time.perf_counter()
        answer = self._executor.execute(decode_batch(pb.ScheduleBatch.FromString(batch)))
        encode_answer(answer)
        total_ms = (time.perf_counter() - started_s) * 1e3
        assert answer.output is not None, answer.error
        forward_ms, sampling_ms = answer.output.forward_us / 1e3, answer.output.sample_us / 1e3
        native = dict(zip(STEP_PARTS, (self._part_ns / 1e6).tolist(), strict=True))
        return {
            "messages": total_ms - forward_ms - sampling_ms,
            "inputs": forward_ms - sum(native.values()),
            **native,
            "sampling": sampling_ms,
            "step": total_ms,
        }


def num_blocks(size: StepSize, num_steps: int, block_size: int) -> int:
    """How many KV blocks `time_steps` needs."""
    num_tokens = size.num_computed + size.num_new + num_steps + _NUM_WARM_UPS
    return size.num_rows * -(-num_tokens // block_size)


def _plans(info: ExecutorInfo, size: StepSize, num_steps: int) -> Iterator[StepPlan]:
    """Decodes of the same rows; or prompts, if nothing is to be computed before."""
    is_decode = size.num_computed > 0
    num_requests = size.num_rows * (1 if is_decode else num_steps)
    prompt = [_TOKEN_ID] * (size.num_computed or size.num_new)
    core = EngineWithQueue(
        SchedulerConfig(
            block_size=info.block_size,
            num_device_blocks=info.num_device_blocks,
            max_num_seqs=size.num_rows,
            max_num_batched_tokens=size.num_rows * len(prompt),
            max_model_len=info.model.max_model_len,
            max_num_waiting=num_requests,
            vocab_size=info.model.vocab_size,
            eos_token_ids=frozenset(),
            # Rows are to read blocks of their own.
            prefix_caching=False,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 1 if is_decode else 1)
    for index in range(num_requests):
        core.add(Request.create(str(index), prompt, params, arrival=index, seed=0))
    if is_decode:
        # What the prompts would leave in the pools costs as much to read as what is there.
        _apply(core, _next_plan(core))
        core._needs_snapshot = True
    for _ in range(num_steps):
        plan = _next_plan(core)
        yield plan
        _apply(core, plan)


def _next_plan(core: EngineWithQueue) -> StepPlan:
    plan = core.schedule()
    assert plan is not None, "requests are left"
    return plan


def _apply(core: EngineWithQueue, plan: StepPlan) -> None:
    token_ids = np.full(len(plan.work.row_ids), _TOKEN_ID, np.int32)
    core.apply(StepOutcome(plan.step_id, StepStatus.OK, token_ids))
