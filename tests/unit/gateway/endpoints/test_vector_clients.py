"""Clients of others at endpoints of vectors: OpenAI's, LangChain's and Cohere's."""

from __future__ import annotations

import cohere
import httpx2
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.unit.gateway.endpoints.vector_gateway import VectorGateway, ids, text, vector

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXTS = [text(5, 6), text(7)]
EMBEDDINGS = [vector("embedder", ids(3, 5, 6)), vector("embedder", ids(3, 7))]


async def test_openai_reads_embeddings_in_each_encoding(gateway: VectorGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        for answer in (
            # Without an encoding the client asks for base64, and decodes it.
            await client.embeddings.create(model="embedder", input=TEXTS),
            await client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float"),
        ):
            for found, expected in zip(answer.data, EMBEDDINGS, strict=True):
                assert found.embedding == pytest.approx(expected, rel=1e-6)
            assert (answer.model, answer.usage.total_tokens) == ("embedder", 9)
        short = await client.embeddings.create(model="embedder", input=[5], dimensions=3)
        expected = vector("embedder", [5], num_dimensions=3)
        assert short.data[0].embedding == pytest.approx(expected, rel=1e-6)
        with pytest.raises(openai.BadRequestError, match="dimensions is 9"):
            await client.embeddings.create(model="embedder", input="t5", dimensions=9)


async def test_langchain_embeds_documents_and_queries(gateway: VectorGateway) -> None:
    async with httpx2.AsyncClient() as http:
        client = OpenAIEmbeddings(
            model="embedder",
            base_url=f"{gateway.url}/v1",
            api_key=SecretStr("none"),
            check_embedding_ctx_length=False,
            http_async_client=http,
        )
        documents = await client.aembed_documents(TEXTS)
        query = await client.aembed_query(TEXTS[1])
    for found, expected in zip((*documents, query), (*EMBEDDINGS, EMBEDDINGS[1]), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


async def test_cohere_reranks(gateway: VectorGateway) -> None:
    async with cohere.AsyncClientV2(api_key="none", base_url=gateway.url) as client:
        answer = await client.rerank(model="ranker", query="t5", documents=TEXTS, top_n=1)
        plain = await gateway.post("/v2/rerank", "ranker", query="t5", documents=TEXTS)
        (found,) = answer.results
        assert found.index == plain["results"][0]["index"]
        assert found.relevance_score == plain["results"][0]["relevance_score"]
        assert answer.id
        assert answer.id.startswith("rerank-")
        with pytest.raises(cohere.BadRequestError):
            await client.rerank(model="classifier", query="t5", documents=TEXTS)
