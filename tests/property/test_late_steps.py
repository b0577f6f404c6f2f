"""A device that is late changes nothing in what is answered, whatever was sent and however late.

The same batches go to an executor whose steps are over when they have begun and to one whose device
takes its time: both must say the same.
"""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_service.device import KVCache
from executor_service.errors import StepFailed
from executor_service.model import InputBatch, LoadedModel, PagedModel, torch_model
from executor_service.runner import CacheConfig, build_runner
from executor_service.service import decode_batch
from executor_service.steps import (
    ExecutorInfo,
    ExecutorLimits,
    Int32Array,
    LogprobColumns,
    ModelInfo,
    PendingStep,
    Runner,
    RunningStep,
    StepAnswer,
    StepExecutor,
    StepInput,
    StepOutput,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import NAN_TOKEN, OUT_OF_MEMORY_TOKEN, VOCAB_SIZE
from tests.contract.served_model import TinyModel, load_tiny_model
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.steps.step_scripts import (
    BLOCK_SIZE,
    BLOCKS_PER_ROW,
    EXECUTOR_EPOCH,
    NUM_ROWS,
    Script,
)

# Whoever finishes a step that was fed it hears that the device is lost.
LOST_TOKEN = OUT_OF_MEMORY_TOKEN - 1
BAD_TOKENS = (NAN_TOKEN, OUT_OF_MEMORY_TOKEN, LOST_TOKEN)
MAX_INFLIGHT_STEPS = 4
CACHE = CacheConfig(BLOCK_SIZE, num_device_blocks=NUM_ROWS * BLOCKS_PER_ROW, num_host_blocks=2)
INFO = ExecutorInfo(
    executor_epoch=EXECUTOR_EPOCH,
    model=ModelInfo("m", "d", "float32", "float32", VOCAB_SIZE, 64),
    block_size=BLOCK_SIZE,
    num_device_blocks=NUM_ROWS * BLOCKS_PER_ROW,
    num_host_blocks=2,
    block_bytes=1,
    limits=ExecutorLimits(max_num_rows=NUM_ROWS, max_inflight_steps=MAX_INFLIGHT_STEPS),
)


class _Model:
    """Samples no token that makes something go wrong."""

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        self.model: PagedModel = torch_model(loaded, cache)

    def logits(self, batch: InputBatch) -> Tensor:
        logits = self.model.logits(batch)
        logits[:, min(BAD_TOKENS) :] -= 1e4
        return logits


@dataclass(frozen=True, slots=True)
class _Lost:
    pending: PendingStep

    @property
    def is_done(self) -> bool:
        return self.pending.is_done

    @property
    def num_more_tokens(self) -> Int32Array | None:
        return self.pending.num_more_tokens

    def wait(self) -> None:
        self.pending.wait()

    def finish(self) -> StepOutput:
        self.pending.finish()
        raise StepFailed("the device is lost, says the test")


@dataclass(frozen=True, slots=True)
class _Runner:
    runner: Runner

    def begin(self, step: StepInput) -> PendingStep | None:
        pending = self.runner.begin(step)
        is_lost = pending is not None and LOST_TOKEN in step.token_ids
        return _Lost(pending) if is_lost and pending is not None else pending


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return load_tiny_model("llama", tmp_path_factory.mktemp("models"))


def _record(
    loaded: LoadedModel, data: st.DataObject, num_batches: int, lag: int
) -> tuple[list[pb.ScheduleBatch], list[StepAnswer]]:
    """A script and what an executor says whose steps are over when they have begun."""
    executor = StepExecutor(INFO, _Runner(build_runner(loaded, CACHE, _Model)))
    script = Script(data.draw, BAD_TOKENS)
    batches: list[pb.ScheduleBatch] = []
    answers: list[StepAnswer] = []
    for number in range(num_batches):
        batches.append(script.next_batch())
        answers.append(executor.execute(decode_batch(batches[-1])))
        if number >= lag:
            script.learn(answers[number - lag])
    return batches, answers


def _replay(
    loaded: LoadedModel, batches: list[pb.ScheduleBatch], lag: int, chance: random.Random
) -> list[StepAnswer]:
    """What an executor says whose device is late by chance; as much is in flight as was then."""
    streams = LateStreams()
    executor = StepExecutor(INFO, _Runner(late_runner(loaded, CACHE, streams, _Model)))
    answers: list[StepAnswer] = []
    running: deque[RunningStep] = deque()
    for number, batch in enumerate(batches):
        step = executor.begin(decode_batch(batch), answers.append)
        if step is not None:
            running.append(step)
        streams.advance(max(0, chance.randrange(-3, 5)))
        streams.advance(chance.randrange(2), swap=True)
        while running and (running[0].pending.is_done or len(answers) <= number - lag):
            executor.finish(running.popleft())
    executor.finish()
    return answers


def _said(answer: StepAnswer) -> Any:  # noqa: ANN401
    """What both must say, durations apart."""
    output = answer.output
    whose = (answer.scheduler_epoch, answer.step_id, answer.status, answer.error)
    if output is None:
        return whose
    return (
        whose,
        output.row_statuses.tolist(),
        output.sampled_token_ids.tolist(),
        dict(output.row_errors),
        _scores(output.logprobs),
        _scores(output.prompt_logprobs),
    )


def _scores(columns: LogprobColumns | None) -> Any:  # noqa: ANN401
    if columns is None:
        return None
    # Rows in the batch that the other leaves out change the last bits.
    logprobs = [round(float(x), 2) + 0.0 for x in (*columns.logprobs, *columns.top_logprobs)]
    whose = (columns.row_indexes, columns.positions, columns.token_ids, columns.top_token_ids)
    return [column.tolist() for column in (*whose, columns.ranks, columns.top_offsets)], logprobs


@settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "15")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    data=st.data(),
    num_batches=st.integers(6, 16),
    lag=st.integers(0, MAX_INFLIGHT_STEPS - 1),
    chance=st.randoms(use_true_random=False),
)
def test_answers_are_the_same_when_the_device_is_late(
    llama: TinyModel, data: st.DataObject, num_batches: int, lag: int, chance: random.Random
) -> None:
    batches, expected = _record(llama.loaded, data, num_batches, lag)
    answers = _replay(llama.loaded, batches, lag, chance)
    assert [_said(answer) for answer in answers] == [_said(answer) for answer in expected]
