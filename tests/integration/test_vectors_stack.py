"""Vectors in real processes: what HTTP clients get equals what sentence-transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from splitserve_client import AsyncClient, SamplingParams, collect_vector
from splitserve_client import PoolingParams as ClientPooling
from splitserve_gateway.config import GatewayConfig
from tests.support.models.vector_models import make_vector_model, random_rows
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import Processes

TOLERANCE = 1e-5
LENGTHS = (1, 3, 90, 17, 5, 60, 2, 33)
TEXTS = [" ".join(f"t{token}" for token in row) for row in random_rows(*LENGTHS)]


def embedder(directory: Path, model_type: str, mode: str) -> Any:  # noqa: ANN401
    """Saves a model with its files of sentence-transformers in `directory` / "embedder"."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    make_vector_model(model_type, directory / "plain")
    transformer = Transformer(str(directory / "plain"))
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)
    made = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    made.save(str(directory / "embedder"))
    return SentenceTransformer(str(directory / "embedder"), device="cpu")


class VectorProcesses(Processes):
    """A scheduler and executors of one model."""

    def start_executor(self, *options: str, address: str = "") -> str:
        return super().start_executor(
            "--dtype", "float32", "--threads", "1", *options, address=address
        )


@pytest.fixture(scope="module")
def processes_of() -> Iterator[Callable[[Path], VectorProcesses]]:
    """Starts processes that serve a model."""
    started: list[VectorProcesses] = []

    def start(model: Path) -> VectorProcesses:
        running = VectorProcesses(model)
        started.append(running)
        running.start_scheduler()
        running.start_executor()
        return running

    yield start
    for each in started:
        each.kill_all()


@asynccontextmanager
async def gateway_of(running: VectorProcesses) -> AsyncIterator[str]:
    """Yields the URL of a gateway, once the executor serves."""
    await running.run_executors(1)
    async with serving(GatewayConfig(schedulers=running.address)) as gateway:
        yield url_of(gateway)


@pytest.fixture(scope="module", params=[("bert", "mean"), ("qwen3", "lasttoken")], ids=str)
def embedding(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    processes_of: Callable[[Path], VectorProcesses],
) -> tuple[VectorProcesses, Any]:
    """A model without cache, and one with it."""
    directory = tmp_path_factory.mktemp("embedding")
    reference = embedder(directory, *request.param)
    return processes_of(directory / "embedder"), reference


async def test_embeddings_are_those_of_sentence_transformers(
    embedding: tuple[VectorProcesses, Any],
) -> None:
    running, reference = embedding
    expected = reference.encode(TEXTS)
    async with gateway_of(running) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        answer = await client.embeddings.create(input=TEXTS, model="embedder")
        cut = await client.embeddings.create(input=TEXTS[:3], model="embedder", dimensions=10)
        await client.close()
    found = np.array([each.embedding for each in answer.data], np.float32)
    assert np.abs(found - expected).max() < TOLERANCE
    assert answer.usage.prompt_tokens == sum(length + 2 for length in LENGTHS)
    for each, whole in zip(cut.data, expected, strict=False):
        short = whole[:10] / np.linalg.norm(whole[:10])
        assert np.abs(np.array(each.embedding) - short).max() < TOLERANCE


async def test_vectors_survive_the_executor_that_computes_them(
    embedding: tuple[VectorProcesses, Any],
) -> None:
    running, reference = embedding
    await running.run_executors(1)
    rows = random_rows(*(1 + number % 100 for number in range(400)), seed=4)
    texts = [" ".join(f"t{token}" for token in row) for row in rows]
    async with AsyncClient(running.address, PATIENT) as client:
        tokenizer = await client.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in texts]
        async with client.session() as session:
            params = SamplingParams(pooling=ClientPooling())
            first = asyncio.Event()

            async def ask(prompt: list[int]) -> list[float]:
                pooled = await collect_vector(session.submit(prompt, params))
                first.set()
                return pooled.vector.tolist()

            asked = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
            await first.wait()
            [executor] = (await client.list_executors()).executors
            running.kill_executor(executor.address)
            running.start_executor()
            found = await asyncio.gather(*asked)
    expected = reference.encode(texts)
    assert np.abs(np.array(found, np.float32) - expected).max() < TOLERANCE


async def test_ranking_is_that_of_a_cross_encoder(
    tmp_path: Path, processes_of: Callable[[Path], VectorProcesses]
) -> None:
    from sentence_transformers import CrossEncoder

    model = tmp_path / "ranker"
    make_vector_model("bert", model, "AutoModelForSequenceClassification", num_labels=1)
    reference = CrossEncoder(str(model), device="cpu")
    query, documents = TEXTS[1], TEXTS[2:]
    expected = reference.predict([(query, document) for document in documents])
    async with (
        gateway_of(processes_of(model)) as url,
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http,
    ):
        body: dict[str, Any] = {"query": query, "documents": documents}
        answers = [await http.post(path, json=body) for path in ("/v1/rerank", "/v2/rerank")]
        scored = await http.post("/score", json={"text_1": query, "text_2": documents})
    for answer in answers:
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        order = [each["index"] for each in results]
        assert order == np.argsort(-expected, kind="stable").tolist()
        found = np.array([each["relevance_score"] for each in results])
        assert np.abs(found - expected[order]).max() < TOLERANCE
    scores = np.array([each["score"] for each in scored.json()["data"]])
    assert np.abs(scores - expected).max() < TOLERANCE
