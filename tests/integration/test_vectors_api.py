"""Vectors through a scheduler process: real client, fake executors without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from executor_service.steps import ModelVectors
from executor_service.steps import PoolingParams as RowPooling
from executor_service.steps import PoolingTask as RowTask
from splitserve_client import (
    AsyncClient,
    InvalidRequest,
    Pooling,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    Usage,
    collect_vector,
)
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.vector_runner import EMBEDDING_SIZE, LABELS, expected_vector
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

TEXTS = [[number, 7, *range(number % 40)] for number in range(60)]


def expected(prompt: Sequence[int], pooling: PoolingParams) -> list[float]:
    task = RowTask((pooling.task or PoolingTask.EMBEDDING).value)
    row = RowPooling(task, pooling.num_dimensions, pooling.raw, pooling.second_text_start)
    return expected_vector(prompt, row)


def embedder(*, is_uncached: bool, watch: StepWatch | None = None) -> FakeExecutor:
    vectors = ModelVectors(EMBEDDING_SIZE, LABELS, is_uncached)
    return FakeExecutor(num_device_blocks=128, vectors=vectors, fault=watch or StepWatch())


@pytest.fixture(params=[True, False], ids=("uncached", "cached"))
async def service(request: pytest.FixtureRequest) -> AsyncIterator[FakeService]:
    async with fake_service(embedder(is_uncached=request.param)) as running:
        yield running


async def check(client: AsyncClient, prompt: list[int], pooling: PoolingParams) -> Usage:
    pooled = await client.pool(prompt, pooling)
    assert pooled.vector.tolist() == pytest.approx(expected(prompt, pooling), abs=1e-6)
    return pooled.usage


async def test_vectors_are_those_of_the_texts(service: FakeService) -> None:
    kinds = (
        PoolingParams(),
        PoolingParams(PoolingTask.SCORES),
        PoolingParams(num_dimensions=2, raw=True),
        PoolingParams(second_text_start=1),
    )
    usages = await asyncio.gather(
        *(check(service.client, prompt, kinds[i % 4]) for i, prompt in enumerate(TEXTS))
    )
    assert [usage.num_prompt_tokens for usage in usages] == [len(prompt) for prompt in TEXTS]
    assert {usage.num_output_tokens for usage in usages} == {0}
    await service.wait_idle()


async def test_a_session_carries_vectors(service: FakeService) -> None:
    params = SamplingParams(pooling=PoolingParams())
    async with service.client.session() as session:
        pooled = await asyncio.gather(
            *(collect_vector(session.submit(prompt, params)) for prompt in TEXTS)
        )
    for prompt, each in zip(TEXTS, pooled, strict=True):
        assert each.vector.tolist() == pytest.approx(expected(prompt, PoolingParams()), abs=1e-6)


async def test_model_says_which_vectors_it_returns(service: FakeService) -> None:
    model = await service.client.get_model()
    assert model.pooling == Pooling(EMBEDDING_SIZE, LABELS)
    assert model.max_model_len == 256
    longest = [3] * 256
    await check(service.client, longest, PoolingParams())
    with pytest.raises(InvalidRequest, match="257 tokens; allowed: at most") as error:
        await service.client.pool([*longest, 3])
    assert error.value.reason == "PROMPT_TOO_LONG"


async def test_wrong_requests_are_refused_and_disturb_nobody(service: FakeService) -> None:
    client = service.client
    others = asyncio.gather(*(check(client, prompt, PoolingParams()) for prompt in TEXTS))
    with pytest.raises(InvalidRequest, match="pooling is not set; the model returns vectors only"):
        await client.complete([1, 2], SamplingParams())
    with pytest.raises(InvalidRequest, match=r"num_dimensions is 7; allowed: 0 to 6"):
        await client.pool([1], PoolingParams(num_dimensions=7))
    with pytest.raises(InvalidRequest, match="allowed with pooling: its default"):
        await client.complete([1], SamplingParams(pooling=PoolingParams(), top_k=3))
    await others


async def test_models_of_tokens_refuse_requests_for_vectors() -> None:
    async with fake_service(FakeExecutor()) as service:
        assert (await service.client.get_model()).pooling is None
        with pytest.raises(InvalidRequest, match="the model returns tokens, no vectors") as error:
            await service.client.pool([1, 2])
        assert error.value.reason == "FEATURE_UNSUPPORTED"


@pytest.mark.parametrize("is_uncached", [True, False])
async def test_texts_are_computed_elsewhere_when_their_executor_is_lost(
    *, is_uncached: bool
) -> None:
    watches = [StepWatch(), StepWatch()]
    executors = [embedder(is_uncached=is_uncached, watch=watch) for watch in watches]
    async with fake_service(*executors) as service:
        for watch in watches:
            watch.hold(after=2)
        asked = [asyncio.ensure_future(check(service.client, p, PoolingParams())) for p in TEXTS]
        await watches[0].wait_held()
        await service.kill(executors[0], watches[0])
        watches[1].release()
        await asyncio.gather(*asked)
