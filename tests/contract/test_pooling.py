"""Rows that return vectors: with blocks and without, and batches that are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from executor_service.service import decode_batch, encode_answer
from executor_service.steps import (
    ExecutorInfo,
    Feature,
    ModelVectors,
    PoolingParams,
    PoolingTask,
    StepExecutor,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.served import (
    BLOCK_SIZE,
    EXECUTOR_EPOCH,
    NUM_DEVICE_BLOCKS,
    PROMPT,
    SCHEDULER_EPOCH,
    make_fake_backend,
    make_info,
)
from tests.support.fakes.vector_runner import (
    EMBEDDING_SIZE,
    LABELS,
    VectorRunner,
    expected_vector,
)
from tests.support.steps.batches import NewRow, Sender, WorkRow, read_f32, read_i32

SENDER = Sender(SCHEDULER_EPOCH, EXECUTOR_EPOCH)
EMBEDDING = pb.PoolingParams(task=pb.POOLING_TASK_EMBEDDING)
SCORES = pb.PoolingParams(task=pb.POOLING_TASK_SCORES)


def info_of(*, is_uncached: bool, size: int = EMBEDDING_SIZE) -> ExecutorInfo:
    info = make_info(make_fake_backend(features=frozenset({Feature.POOLING})))
    vectors = ModelVectors(size, LABELS, is_uncached)
    return replace(info, model=replace(info.model, vectors=vectors), num_host_blocks=0)


def executor_of(info: ExecutorInfo) -> StepExecutor:
    num_blocks = 0 if info.model.is_uncached else NUM_DEVICE_BLOCKS
    return StepExecutor(info, VectorRunner(BLOCK_SIZE, num_blocks))


def execute(executor: StepExecutor, batch: pb.ScheduleBatch) -> pb.StepResult:
    return encode_answer(executor.execute(decode_batch(batch)))


def vectors_of(result: pb.StepResult) -> list[list[float]]:
    assert result.status == pb.STEP_STATUS_OK, result
    numbers, offsets = read_f32(result.vectors), read_i32(result.vector_offsets)
    assert (offsets[0], offsets[-1]) == (0, len(numbers))
    return [numbers[start:end] for start, end in pairwise(offsets)]


def new_row(row_id: int, blocks: tuple[int, ...] = (), **params: Any) -> NewRow:  # noqa: ANN401
    # Rows of these tests have a temperature unless they say that they have none.
    return NewRow(row_id, blocks, len(PROMPT), {"temperature": None, **params})


def test_rows_without_blocks_return_the_vectors_that_they_ask_for() -> None:
    executor = executor_of(info_of(is_uncached=True))
    cut = pb.PoolingParams(task=pb.POOLING_TASK_EMBEDDING, num_dimensions=2, raw=True)
    batch = SENDER.batch(
        1,
        new=[new_row(0, pooling=EMBEDDING), new_row(1, pooling=SCORES), new_row(2, pooling=cut)],
        work=[WorkRow(row, 0, PROMPT) for row in (1, 0, 2)],
    )
    result = execute(executor, batch)
    asked = [
        PoolingParams(PoolingTask.SCORES),
        PoolingParams(PoolingTask.EMBEDDING),
        PoolingParams(PoolingTask.EMBEDDING, 2, raw=True),
    ]
    for vector, pooling in zip(vectors_of(result), asked, strict=True):
        assert vector == pytest.approx(expected_vector(PROMPT, pooling), abs=1e-6)
    assert read_i32(result.sampled_token_ids) == [-1, -1, -1]


def test_rows_with_blocks_return_their_vector_with_the_last_token() -> None:
    executor = executor_of(info_of(is_uncached=False))
    new = [new_row(0, (3, 1), pooling=EMBEDDING)]
    work = [WorkRow(0, 0, PROMPT[:4], samples=False)]
    assert vectors_of(execute(executor, SENDER.batch(1, new=new, work=work))) == [[]]
    result = execute(executor, SENDER.batch(2, base=1, work=[WorkRow(0, 4, PROMPT[4:])]))
    [vector] = vectors_of(result)
    expected = expected_vector(PROMPT, PoolingParams(PoolingTask.EMBEDDING))
    assert vector == pytest.approx(expected, abs=1e-6)


_PARAMS = "new_rows.sampling_params[0].pooling"
_DIMENSIONS = f"{_PARAMS}.num_dimensions"
_SECOND = "new_rows.sampling_params.pooling.second_text_start"


def _pooling(**values: Any) -> pb.PoolingParams:  # noqa: ANN401
    return pb.PoolingParams(**{"task": pb.POOLING_TASK_EMBEDDING, **values})


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({}, _PARAMS, "is absent; required: the model returns vectors"),
        ({"pooling": EMBEDDING, "top_k": 3}, _PARAMS, "is set beside others"),
        (
            {"pooling": _pooling(num_dimensions=7)},
            f"{_PARAMS}.num_dimensions",
            "is 7; allowed: 0 to 6",
        ),
        ({"pooling": _pooling(num_dimensions=-1)}, f"{_PARAMS}.num_dimensions", "is -1"),
        ({"pooling": _pooling(second_text_start=6)}, _SECOND, "6"),
        ({"pooling": _pooling(second_text_start=-1)}, _SECOND, "-1"),
        ({"pooling": _pooling(task=0)}, "new_rows.sampling_params.pooling.task", "is 0"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, Any], field: str, message: str) -> None:
    executor = executor_of(info_of(is_uncached=True))
    batch = SENDER.batch(1, new=[new_row(0, **params)], work=[WorkRow(0, 0, PROMPT)])
    error = execute(executor, batch).error
    reason = pb.StepErrorReason.Name(error.reason)
    assert (reason, error.field) == ("STEP_ERROR_REASON_MALFORMED", field)
    assert message in error.message


@pytest.mark.parametrize(
    ("batch", "reason", "field"),
    [
        (
            SENDER.batch(1, new=[new_row(0, (3,), pooling=EMBEDDING)]),
            "MALFORMED",
            "new_rows.block_ids",
        ),
        (
            SENDER.batch(1, new=[new_row(0, pooling=EMBEDDING)], work=[WorkRow(0, 1, PROMPT)]),
            "POSITION_OUT_OF_RANGE",
            "work.num_computed_tokens",
        ),
        (
            SENDER.batch(1, new=[new_row(0, pooling=EMBEDDING)], work=[WorkRow(0, 0, back=1)]),
            "MALFORMED",
            "work.sampled_steps_back",
        ),
    ],
    ids=("blocks", "parts", "sampled"),
)
def test_rows_without_blocks_are_computed_as_a_whole(
    batch: pb.ScheduleBatch, reason: str, field: str
) -> None:
    error = execute(executor_of(info_of(is_uncached=True)), batch).error
    assert (pb.StepErrorReason.Name(error.reason), error.field) == (
        f"STEP_ERROR_REASON_{reason}",
        field,
    )


def test_models_of_tokens_refuse_pooling() -> None:
    backend = make_fake_backend()
    executor = StepExecutor(make_info(backend), backend.runner)
    error = execute(executor, SENDER.batch(1, new=[new_row(0, (3,), pooling=EMBEDDING)])).error
    assert error.reason == pb.STEP_ERROR_REASON_FEATURE_UNSUPPORTED
    assert error.field == _PARAMS


def test_a_kind_of_vector_that_the_model_lacks_is_refused() -> None:
    executor = executor_of(info_of(is_uncached=True, size=0))
    error = execute(executor, SENDER.batch(1, new=[new_row(0, pooling=EMBEDDING)])).error
    assert (error.field, error.message) == (
        f"{_PARAMS}.task",
        "is 1; allowed: 2, the model has no embeddings",
    )
