"""Requests that return vectors: what an engine refuses, plans and makes of results."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest

from executor_service.steps import PoolingParams as RowPooling
from executor_service.steps import PoolingTask as RowTask
from executor_service.steps import RowStatus, StepInput
from scheduler_service.scheduler.values import (
    FinishReason,
    PoolingParams,
    PoolingTask,
    Request,
    SamplingParams,
    SchedulingParams,
    VectorSizes,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import DomainError
from tests.support.core.driver import make_config
from tests.support.core.in_process import InProcessEngine
from tests.support.fakes.fake_runner import StepFault, no_fault
from tests.support.fakes.vector_runner import (
    EMBEDDING_SIZE,
    LABELS,
    VectorRunner,
    expected_vector,
)

BUDGET = 32
MAX_PROMPT = 32


class VectorEngine:
    """Engine, executor and requests of a model of vectors."""

    def __init__(
        self,
        *,
        is_uncached: bool,
        depth: int = 2,
        fault: Callable[[StepInput], StepFault] = no_fault,
        preempt_at: Collection[int] = (),
        sizes: tuple[int, int] = (EMBEDDING_SIZE, len(LABELS)),
        **options: object,
    ) -> None:
        values: dict[str, Any] = {
            "max_num_batched_tokens": BUDGET,
            "max_model_len": MAX_PROMPT + 1,
            "max_num_waiting": 100,
            "num_device_blocks": 16,
            "vectors": VectorSizes(*sizes, is_uncached),
        }
        if is_uncached:
            values |= {"block_size": MAX_PROMPT + 1}
        self.config = make_config(**(values | options))
        num_blocks = 0 if is_uncached else self.config.num_device_blocks
        self.runner = VectorRunner(self.config.block_size, num_blocks, fault)
        self.engine = InProcessEngine(
            self.config, self.runner, epoch=1, depth=depth, preempt_at=frozenset(preempt_at)
        )
        self.requests: list[Request] = []

    def add(
        self, prompt: Sequence[int], pooling: PoolingParams | None = None, **options: object
    ) -> Request:
        params = SamplingParams(pooling=pooling or PoolingParams(), **options)  # type: ignore[arg-type]
        number = len(self.requests)
        request = Request.create(f"r{number}", prompt, params, arrival=number, seed=0)
        self.engine.add(request)
        self.requests.append(request)
        return request

    def check(self) -> None:
        """Every request has its own vector, and nothing else was delivered."""
        for request in self.requests:
            assert request.error is None
            assert vector_of(request) == pytest.approx(expected(request), abs=1e-6)
            assert request.finish_reason is FinishReason.STOP
            assert request.sequence.num_output_tokens == 0
            assert self.engine.delivered[request.request_id] == [[]]
        core = self.engine.scheduler
        assert core.num_free_blocks == self.config.num_device_blocks


def vector_of(request: Request) -> list[float]:
    return list(struct.unpack(f"<{len(request.vector) // 4}f", request.vector))


def expected(request: Request) -> list[float]:
    pooling, sequence = request.params.pooling, request.sequence
    assert pooling is not None
    row = RowPooling(
        RowTask(pooling.task.value),
        pooling.num_dimensions,
        pooling.raw,
        pooling.second_text_start,
    )
    return expected_vector(sequence.token_ids[: sequence.num_prompt_tokens].tolist(), row)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Texts of very different lengths, the longest that there may be among them."""
    generator = np.random.default_rng(seed)
    lengths = [MAX_PROMPT, 1, *generator.integers(1, MAX_PROMPT, count - 2).tolist()]
    return [generator.integers(1, 90, length).tolist() for length in lengths]


KINDS = (
    PoolingParams(),
    PoolingParams(PoolingTask.SCORES),
    PoolingParams(num_dimensions=2, raw=True),
    PoolingParams(PoolingTask.EMBEDDING, num_dimensions=EMBEDDING_SIZE),
)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("is_uncached", [True, False])
def test_each_request_gets_its_own_vector(is_uncached: bool, depth: int) -> None:
    served = VectorEngine(is_uncached=is_uncached, depth=depth)
    for index, prompt in enumerate(prompts(40)):
        served.add(prompt, KINDS[index % len(KINDS)])
    served.engine.run()
    served.check()
    assert max(map(sum, served.runner.steps)) <= BUDGET


def test_texts_without_cache_are_computed_in_one_step_each() -> None:
    served = VectorEngine(is_uncached=True)
    texts = prompts(30)
    for prompt in texts:
        served.add(prompt)
    served.engine.run()
    computed = sorted(length for step in served.runner.steps for length in step)
    assert computed == sorted(map(len, texts))
    # Short texts share steps.
    assert len(served.runner.steps) < len(texts)


def test_cached_texts_are_computed_in_chunks_and_once() -> None:
    served = VectorEngine(is_uncached=False, max_num_batched_tokens=8)
    start, [first, second] = list(range(1, 21)), [[50, 51], [60]]
    served.add(start + first)
    served.engine.run()
    assert max(map(sum, served.runner.steps)) <= 8
    served.add(start + second)
    served.engine.run()
    assert served.requests[1].num_cached_tokens == 20
    served.check()


def test_cached_texts_survive_preemption() -> None:
    served = VectorEngine(
        is_uncached=False, max_num_batched_tokens=8, num_device_blocks=10, preempt_at={2, 3, 5}
    )
    for prompt in prompts(8, seed=3):
        served.add(prompt)
    served.engine.run()
    assert served.engine.scheduler.num_preemptions > 0
    served.check()


def test_pair_tells_where_its_second_text_begins() -> None:
    served = VectorEngine(is_uncached=True)
    pair = served.add([4, 5, 6], PoolingParams(second_text_start=2))
    text = served.add([4, 5, 6])
    served.engine.run()
    served.check()
    assert vector_of(pair) != vector_of(text)


@pytest.mark.parametrize("is_uncached", [True, False])
def test_a_row_that_fails_ends_its_request_alone(is_uncached: bool) -> None:
    def fault(step: StepInput) -> StepFault:
        owners = step.row_ids.repeat(step.num_new_tokens)
        failing = owners[step.token_ids == 13].tolist()
        return StepFault(rows=dict.fromkeys(failing, RowStatus.FAILED))

    served = VectorEngine(is_uncached=is_uncached, fault=fault)
    unlucky = served.add([13])
    good = served.add([7, 8])
    served.engine.run()
    assert unlucky.error is not None
    assert unlucky.error[0] == "ROW_FAILED"
    assert vector_of(good) == pytest.approx(expected(good), abs=1e-6)


@pytest.mark.parametrize("is_uncached", [True, False])
@pytest.mark.parametrize(
    "status", [pb.STEP_STATUS_NEED_SNAPSHOT, pb.STEP_STATUS_FAILED, pb.STEP_STATUS_REFUSED]
)
def test_texts_are_computed_again_when_their_step_is_lost(
    status: pb.StepStatus, is_uncached: bool
) -> None:
    served = VectorEngine(is_uncached=is_uncached, depth=1)
    for prompt in prompts(12, seed=5):
        served.add(prompt)
    served.engine.fill()
    served.engine.answer()
    served.engine.fill()
    served.engine.skip(status)
    served.engine.run()
    served.check()
    assert max(map(sum, served.runner.steps)) <= BUDGET


def without_vectors(result: pb.StepResult) -> None:
    result.vectors = result.vector_offsets = b""


def one_number_short(result: pb.StepResult) -> None:
    result.vectors = result.vectors[4:]
    offsets = np.frombuffer(result.vector_offsets, "<i4").copy()
    offsets[1:] -= 1
    result.vector_offsets = offsets.tobytes()


def not_finite(result: pb.StepResult) -> None:
    result.vectors = struct.pack("<f", float("nan")) + result.vectors[4:]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (without_vectors, "the vector has 0 numbers; required: 6"),
        (one_number_short, "the vector has 5 numbers; required: 6"),
        (not_finite, "the vector has numbers that are not finite"),
    ],
)
def test_a_vector_that_breaks_the_contract_fails_its_row(
    spoil: Callable[[pb.StepResult], None], problem: str
) -> None:
    served = VectorEngine(is_uncached=True, depth=1)
    spoiled = served.add([5, 6, 7])
    served.engine.fill()
    served.engine.answer(spoil)
    assert spoiled.error == ("ROW_FAILED", f"the executor broke the step contract: {problem}")


def test_vectors_that_belong_to_no_row_cost_the_executor() -> None:
    served = VectorEngine(is_uncached=True, depth=1)
    served.add([5, 6, 7])
    served.engine.fill()

    def spoil(result: pb.StepResult) -> None:
        result.vectors += bytes(4)

    with pytest.raises(Exception, match="vector_offsets has 2 elements for 1 rows and 28 bytes"):
        served.engine.answer(spoil)


@pytest.mark.parametrize(
    ("pooling", "options", "message"),
    [
        (PoolingParams(num_dimensions=7), {}, "pooling.num_dimensions is 7; allowed: 0 to 6"),
        (PoolingParams(num_dimensions=-1), {}, "pooling.num_dimensions is -1; allowed: 0 to 6"),
        (
            PoolingParams(PoolingTask.SCORES, num_dimensions=1),
            {},
            "pooling.num_dimensions is 1; allowed: 0 to 0",
        ),
        (
            PoolingParams(second_text_start=3),
            {},
            "pooling.second_text_start is 3; allowed: 0 to 2",
        ),
        (PoolingParams(), {"temperature": 0.5}, "temperature is 0.5; allowed with pooling"),
        (PoolingParams(), {"max_tokens": 2}, "max_tokens is 2; allowed with pooling"),
        (PoolingParams(), {"n": 2}, "n is 2; allowed with pooling: its default"),
        (PoolingParams(), {"num_logprobs": 2}, "num_logprobs is 2; allowed with pooling"),
    ],
)
def test_wrong_parameters_are_refused_by_name(
    pooling: PoolingParams, options: dict[str, object], message: str
) -> None:
    served = VectorEngine(is_uncached=True)
    with pytest.raises(DomainError, match=message) as refused:
        served.add([1, 2, 3], pooling, **options)
    assert refused.value.reason == "SAMPLING_PARAMS_INVALID"


def test_a_kind_of_vector_that_the_model_lacks_is_refused() -> None:
    embedder = VectorEngine(is_uncached=True, sizes=(EMBEDDING_SIZE, 0))
    with pytest.raises(DomainError, match="task is scores; the model has embeddings"):
        embedder.add([1], PoolingParams(PoolingTask.SCORES))
    classifier = VectorEngine(is_uncached=True, sizes=(0, len(LABELS)))
    with pytest.raises(DomainError, match="task is embedding; the model has scores"):
        classifier.add([1], PoolingParams(PoolingTask.EMBEDDING))
    scored = classifier.add([1, 2])
    classifier.engine.run()
    assert len(vector_of(scored)) == len(LABELS)


def test_tokens_and_vectors_are_not_mixed() -> None:
    served = VectorEngine(is_uncached=True)
    core = served.engine.scheduler
    asks_tokens = Request.create("t", [1], SamplingParams(), arrival=1, seed=0)
    with pytest.raises(DomainError, match="pooling is not set; the model returns vectors only"):
        core.check(asks_tokens)
    resumed = Request.create(
        "t",
        [1],
        SamplingParams(pooling=PoolingParams()),
        arrival=1,
        seed=0,
        resume_token_ids=[[3]],
        scheduling=SchedulingParams(),
    )
    with pytest.raises(DomainError, match="resume_token_ids is set; allowed with pooling"):
        core.check(resumed)


@pytest.mark.parametrize("is_uncached", [True, False])
def test_a_text_that_is_too_long_is_refused_with_the_limit(is_uncached: bool) -> None:
    served = VectorEngine(is_uncached=is_uncached)
    with pytest.raises(DomainError, match="33 tokens; allowed: at most max_model_len 32") as error:
        served.add([1] * (MAX_PROMPT + 1))
    assert error.value.reason == "PROMPT_TOO_LONG"
