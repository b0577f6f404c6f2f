"""Vectors of many texts and pairs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tokenizers import processors

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    AsyncClient,
    Client,
    InvalidRequest,
    ModelChanged,
    PoolingParams,
    PoolingTask,
)
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import FakeScheduler, vector_of
from tests.support.models import tiny_tokenizers
from tests.unit.client.conftest import VirtualTime

CLS, SEP = 900, 901
INFO = api.PoolingInfo(embedding_size=4, labels=["LABEL_0"])
TEXTS = [f"t{number}" for number in range(2, 40)]


@pytest.fixture
def fake() -> FakeScheduler:
    tokenizer = tiny_tokenizers.words(900)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    prompts = {"prompts": {"query": "t1 "}}
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "config_sentence_transformers.json": json.dumps(prompts).encode(),
    }
    return FakeScheduler(tokenizer_files=files, pooling=INFO)


def vector(token_ids: list[int], **pooling: Any) -> object:  # noqa: ANN401
    expected = vector_of(token_ids, api.PoolingParams(**pooling), INFO)
    return pytest.approx(expected, rel=1e-6)


async def test_vectors_are_in_the_order_of_the_texts(client: AsyncClient) -> None:
    found = await client.embed(TEXTS, max_running=5)
    assert len(found) == len(TEXTS)
    for number, pooled in enumerate(found, 2):
        assert pooled.vector.tolist() == vector([CLS, number, SEP])
        assert pooled.usage.num_prompt_tokens == 3
    assert await client.embed([]) == []


async def test_texts_are_encoded_as_asked_for(client: AsyncClient, fake: FakeScheduler) -> None:
    short = PoolingParams(PoolingTask.EMBEDDING, num_dimensions=2)
    (one,) = await client.embed(["t5 t6 t7"], short, prompt_name="query", max_tokens=4)
    assert list(fake.requests[0].prompt_token_ids) == [CLS, 1, 5, SEP]
    assert one.vector.tolist() == vector([CLS, 1, 5, SEP], task=1, num_dimensions=2)
    with pytest.raises(InvalidRequest, match="prompt_name is 'x'; allowed: 'query'"):
        await client.embed(["t5"], prompt_name="x")
    with pytest.raises(ValueError, match="max_running is 0"):
        await client.embed(["t5"], max_running=0)


async def test_scores_are_those_of_the_pairs(client: AsyncClient) -> None:
    scores = await client.score([("t5 t6", "t7"), ("t5", "t8 t9")], max_tokens=6)
    for score, prompt, start in (
        (scores[0], [CLS, 5, 6, SEP, 7, SEP], 4),
        (scores[1], [CLS, 5, SEP, 8, 9, SEP], 3),
    ):
        assert [score] == vector(prompt, task=2, second_text_start=start)


async def test_scores_are_refused_when_there_are_several_labels(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    fake.pooling = api.PoolingInfo(labels=["bad", "good"])
    with pytest.raises(InvalidRequest, match="the model returns 2 scores"):
        await client.score([("t5", "t6")])


async def test_error_of_one_text_ends_all(client: AsyncClient, fake: FakeScheduler) -> None:
    def refuse(request: api.GenerateRequest) -> None:
        if 7 in request.prompt_token_ids:
            raise DomainError("PROMPT_TOO_LONG", "prompt_token_ids has too many")

    fake.before_request = refuse
    fake.hold = asyncio.Event()
    with pytest.raises(InvalidRequest, match="has too many"):
        await client.embed(TEXTS)


async def test_full_queue_is_a_pause(
    client: AsyncClient, fake: FakeScheduler, virtual_time: VirtualTime
) -> None:
    refusals = iter([True] * 3)

    def refuse(_: object) -> None:
        if next(refusals, False):
            raise DomainError("QUEUE_FULL", "try again")

    fake.before_request = refuse
    assert len(await client.embed(TEXTS)) == len(TEXTS)
    assert len(virtual_time.pauses_s) == 3


async def test_texts_are_encoded_again_when_the_model_changed(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    await client.embed(["t5"])
    fake.model_digest = "beef"
    fake.tokenizer_files = {
        "tokenizer.json": tiny_tokenizers.words(900, is_reversed=True).to_str().encode()
    }
    fake.requests.clear()
    (pooled,) = await client.embed(["t5"])
    assert list(fake.requests[-1].prompt_token_ids) == [894]
    assert pooled.vector.tolist() == vector([894])


async def test_model_that_changes_again_is_an_error(
    client: AsyncClient, fake: FakeScheduler
) -> None:
    def change(_: object) -> None:
        fake.model_digest += "0"

    fake.before_request = change
    with pytest.raises(ModelChanged):
        await client.embed(["t5"])


async def test_single_texts_have_no_seed(client: AsyncClient) -> None:
    pooled = await client.pool([5, 6])
    assert pooled.vector.tolist() == vector([5, 6])


async def test_synchronous_client_returns_the_same(client: AsyncClient, address: str) -> None:
    def ask() -> tuple[list[list[float]], list[float]]:
        with Client(address) as plain:
            embedded = [pooled.vector.tolist() for pooled in plain.embed(TEXTS[:3])]
            return embedded, plain.score([("t5", "t6")])

    embedded, scores = await asyncio.to_thread(ask)
    assert embedded == [pooled.vector.tolist() for pooled in await client.embed(TEXTS[:3])]
    assert scores == await client.score([("t5", "t6")])
