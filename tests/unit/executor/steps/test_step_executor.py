"""What the contract tests cannot provoke through a real runner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from executor_service.errors import OutOfMemory, StepFailed
from executor_service.service import decode_batch
from executor_service.steps import (
    Feature,
    FinishedStep,
    PendingStep,
    StepAnswer,
    StepErrorReason,
    StepExecutor,
    StepInput,
    StepOutput,
    StepStatus,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.fakes.fake_runner import FakeRunner, expected_tokens
from tests.support.steps.batches import NewRow, Sender, WorkRow
from tests.support.steps.step_driver import make_executor_info

SENDER = Sender(1, 1)
INFO = make_executor_info()
INTERNAL = "internal error; the executor's log has the details"


class _Runner:
    """Does what a function says, once; then it is a FakeRunner."""

    def __init__(self, first: Callable[[StepInput], StepOutput]) -> None:
        self.first: Callable[[StepInput], StepOutput] | None = first
        self.fake = FakeRunner(block_size=4, num_device_blocks=16)

    def begin(self, step: StepInput) -> PendingStep:
        if self.first is not None:
            first, self.first = self.first, None
            return FinishedStep(first(step))
        return self.fake.begin(step)


def _raises(error: BaseException, cause: BaseException | None = None) -> _Runner:
    def execute(_step: StepInput) -> StepOutput:
        raise error from cause

    return _Runner(execute)


def _executor(**changes: Any) -> StepExecutor:  # noqa: ANN401
    return StepExecutor(replace(INFO, **changes), FakeRunner(block_size=4, num_device_blocks=16))


def _first_step(step_executor: StepExecutor) -> StepAnswer:
    batch = SENDER.batch(1, new=[NewRow(0, (0, 1))], work=[WorkRow(0, 0, [5, 6])])
    return step_executor.execute(decode_batch(batch))


@pytest.mark.parametrize(
    ("runner", "reason", "message"),
    [
        (_raises(RuntimeError("prompt text")), StepErrorReason.INTERNAL, INTERNAL),
        (_raises(StepFailed("lost it")), StepErrorReason.INTERNAL, "lost it"),
        (_raises(OutOfMemory("1 of 2 GiB")), StepErrorReason.OUT_OF_MEMORY, "1 of 2 GiB"),
        (_raises(MemoryError("secret")), StepErrorReason.OUT_OF_MEMORY, INTERNAL),
        (
            _raises(StepFailed("no room"), OutOfMemory("gone")),
            StepErrorReason.OUT_OF_MEMORY,
            "no room",
        ),
    ],
    ids=["unexpected", "StepFailed", "OutOfMemory", "MemoryError", "caused by OutOfMemory"],
)
def test_step_fails_when_the_runner_raises(
    runner: _Runner, reason: StepErrorReason, message: str
) -> None:
    answer = _first_step(StepExecutor(INFO, runner))
    assert answer.error is not None
    assert (answer.status, answer.error.reason, answer.error.message) == (
        StepStatus.FAILED,
        reason,
        message,
    )


def test_delta_is_taken_when_the_step_before_failed_in_the_runner() -> None:
    step_executor = StepExecutor(INFO, _raises(RuntimeError()))
    _first_step(step_executor)
    batch = SENDER.batch(2, base=1, work=[WorkRow(0, 0, [5, 6])])
    answer = step_executor.execute(decode_batch(batch))
    assert answer.output is not None
    assert answer.output.sampled_token_ids.tolist() == expected_tokens([5, 6], 1, 0, 128)


def _broken_output(_step: StepInput) -> StepOutput:
    return StepOutput(np.ones(5, np.uint8), np.zeros(5, np.int32))


def test_step_fails_when_the_runner_answers_for_other_rows() -> None:
    step_executor = StepExecutor(INFO, _Runner(_broken_output))
    answer = _first_step(step_executor)
    assert (answer.status, answer.error and answer.error.message) == (StepStatus.FAILED, INTERNAL)
    answer = step_executor.execute(decode_batch(SENDER.batch(2, base=1)))
    assert answer.status is StepStatus.NEED_SNAPSHOT


@pytest.mark.parametrize(
    ("feature", "params"),
    [
        (Feature.LOGPROBS, {"num_logprobs": 0}),
        (Feature.PROMPT_LOGPROBS, {"num_prompt_logprobs": 0}),
        (Feature.PENALTIES, {"repetition_penalty": 1.5}),
        (Feature.LOGIT_BIAS, {"logit_bias": {1: 1.0}}),
        (Feature.LOGIT_BIAS, {"min_tokens": 1}),
        (Feature.TOKEN_CONSTRAINTS, {"allowed_token_ids": [1]}),
        (Feature.TOKEN_CONSTRAINTS, {"bad_words_token_ids": [pb.TokenSequence(token_ids=[1])]}),
        (Feature.TOKEN_CONSTRAINTS, {"logit_bias": {1: -math.inf}}),
    ],
)
def test_row_is_refused_when_its_feature_was_not_announced(
    feature: Feature, params: dict[str, object]
) -> None:
    history = [1] if {"num_prompt_logprobs", "repetition_penalty"} & params.keys() else []
    batch = decode_batch(SENDER.batch(1, new=[NewRow(0, (0,), params=params, history=history)]))
    assert _executor().execute(batch).status is StepStatus.OK
    error = _executor(features=INFO.features - {feature}).execute(batch).error
    assert error is not None
    assert (error.reason, error.field) == (
        StepErrorReason.FEATURE_UNSUPPORTED,
        f"new_rows.sampling_params[0].{next(iter(params))}",
    )
    assert feature.name in error.message


def test_row_is_taken_when_it_sets_features_to_neutral_values() -> None:
    params = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0}
    batch = SENDER.batch(1, new=[NewRow(0, (0,), params=params)])
    step_executor = _executor(features=frozenset())
    assert step_executor.execute(decode_batch(batch)).status is StepStatus.OK


@pytest.mark.parametrize(("position", "status"), [(5, StepStatus.OK), (6, StepStatus.REFUSED)])
def test_position_is_refused_when_no_sequence_is_that_long(
    position: int, status: StepStatus
) -> None:
    # The second block has room for two tokens more.
    step_executor = _executor(model=replace(INFO.model, max_model_len=6))
    row = WorkRow(0, 0, list(range(1, position + 2)))
    batch = SENDER.batch(1, new=[NewRow(0, (0, 1))], work=[row])
    assert step_executor.execute(decode_batch(batch)).status is status


def test_table_is_refused_when_it_is_longer_than_the_pool() -> None:
    answer = _executor().execute(decode_batch(SENDER.batch(1, new=[NewRow(0, [0] * 17)])))
    assert answer.error is not None
    assert answer.error.reason is StepErrorReason.POSITION_OUT_OF_RANGE


def test_history_holds_sampled_tokens_when_runner_is_asked() -> None:
    histories = []

    class _Listening(FakeRunner):
        def execute(self, step: StepInput) -> StepOutput:
            histories.append([list(history or ()) for history in step.histories])
            return super().execute(step)

    step_executor = StepExecutor(INFO, _Listening(block_size=4, num_device_blocks=16))
    row = NewRow(0, (0, 1), num_prompt=2, params={"presence_penalty": 1.0}, history=[5, 6])
    for batch in (
        SENDER.batch(1, new=[row], work=[WorkRow(0, 0, [5, 6])]),
        SENDER.batch(2, base=1, work=[WorkRow(0, 2, back=1)]),
    ):
        step_executor.execute(decode_batch(batch))
    assert histories == [[[5, 6]], [[5, 6, *expected_tokens([5, 6], 1, 0, 128)]]]


def _prompt(sender: Sender, step_id: int) -> pb.ScheduleBatch:
    return sender.batch(step_id, new=[NewRow(0, (0, 1))], work=[WorkRow(0, 0, [5, 6])])


def test_last_scheduler_is_refused_when_another_life_has_begun() -> None:
    step_executor = _executor()
    taken = step_executor.execute(decode_batch(_prompt(Sender(9, 1), step_id=1)))
    assert taken.status is StepStatus.OK
    step_executor.begin_life(2)

    late = step_executor.execute(decode_batch(_prompt(Sender(9, 1), step_id=2)))
    assert late.error is not None
    assert late.error.reason is StepErrorReason.WRONG_EXECUTOR_EPOCH

    # Nothing is left of the last one: neither its epoch nor its steps nor its rows.
    delta = step_executor.execute(decode_batch(Sender(3, 2).batch(2, base=1)))
    assert delta.status is StepStatus.NEED_SNAPSHOT
    taken = step_executor.execute(decode_batch(_prompt(Sender(3, 2), step_id=1)))
    assert taken.status is StepStatus.OK
