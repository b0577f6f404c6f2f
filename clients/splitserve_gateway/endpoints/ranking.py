"""Scores of pairs: `/v1/rerank` (as Jina), `/v2/rerank` (as Cohere), and `/score` (as vLLM)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import Json, listed_answer, with_notes
from splitserve_gateway.endpoints.vectors import vector_head, vector_usage
from splitserve_gateway.generation import Comparison, TextPairs, answer_id, compare, compares
from splitserve_gateway.http import invalid
from splitserve_gateway.schemas import RerankRequest, ScoreRequest

router = APIRouter()


# -- Rankings --------------------------------------------------------------------------------------


@router.post("/rerank")
@router.post("/v1/rerank")
async def rerank(request: Request) -> Response:
    """Orders documents by how well they match a query, most relevant first."""
    gateway = gateway_of(request)
    async with gateway.reading(request, RerankRequest) as body:
        comparison = await _compare_documents(gateway, body)
        documents = body.texts if body.return_documents is not False else None
    ranked, num_tokens = await _ranked(comparison, body.top_n, documents)
    start: Json = {
        "id": f"rerank-{answer_id(body.request_id)}",
        "model": comparison.request.serving.model_name,
    }
    return with_notes(await listed_answer(start, "results", ranked, vector_usage(num_tokens)), body)


@router.post("/v2/rerank")
async def rerank_as_cohere(request: Request) -> Response:
    """Orders documents by how well they match a query, in the form of Cohere's API."""
    gateway = gateway_of(request)
    async with gateway.reading(request, RerankRequest) as body:
        comparison = await _compare_documents(gateway, body)
        documents = body.texts if body.return_documents else None
    ranked, num_tokens = await _ranked(comparison, body.top_n, documents)
    meta = {
        "api_version": {"version": "2"},
        "tokens": {"input_tokens": num_tokens, "output_tokens": 0},
    }
    start: Json = {"id": f"rerank-{answer_id(body.request_id)}"}
    return with_notes(await listed_answer(start, "results", ranked, {"meta": meta}), body)


async def _compare_documents(gateway: Gateway, body: RerankRequest) -> Comparison:
    serving = await gateway.choose(body.model, compares)
    documents = {f"documents.{index}": text for index, text in enumerate(body.texts)}
    pairs = TextPairs(
        {"query": body.query},
        documents,
        is_search=True,
        max_second_tokens=body.max_tokens_per_doc,
    )
    return await compare(serving, body, pairs)


async def _ranked(
    comparison: Comparison, top_n: int | None, documents: list[str] | None
) -> tuple[list[Json], int]:
    """Returns the first `top_n` results, and the number of tokens. Equal scores keep their order.

    `documents`: None for results without them.
    """
    scores, num_tokens = await comparison.scores()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results: list[Json] = [{"index": each, "relevance_score": scores[each]} for each in order]
    if documents is not None:
        for result, index in zip(results, order, strict=True):
            result["document"] = {"text": documents[index]}
    return results, num_tokens


# -- Scores ----------------------------------------------------------------------------------------


@router.post("/score")
@router.post("/v1/score")
async def score(request: Request) -> Response:
    """Scores how well each pair of texts matches."""
    gateway = gateway_of(request)
    async with gateway.reading(request, ScoreRequest) as body:
        pairs = _pairs(body)
        serving = await gateway.choose(body.model, compares)
        comparison = await compare(serving, body, pairs)
    scores, num_tokens = await comparison.scores()
    data: list[Json] = [
        {"index": index, "object": "score", "score": each} for index, each in enumerate(scores)
    ]
    head = vector_head("score", comparison.request, body.request_id)
    return with_notes(await listed_answer(head, "data", data, vector_usage(num_tokens)), body)


def _pairs(body: ScoreRequest) -> TextPairs:
    """Returns the texts of `body`. Raises ApiError if two fields of one API are not given."""
    given = {
        name: texts
        for name in ("text_1", "text_2", "queries", "documents")
        if (texts := getattr(body, name)) is not None
    }
    if list(given) not in (["text_1", "text_2"], ["queries", "documents"]):
        names = " and ".join(given) or "none of them"
        message = f"{names} given; allowed: text_1 and text_2, or queries and documents"
        raise invalid(message, "text_1")
    first, second = (_by_path(name, texts) for name, texts in given.items())
    return TextPairs(first, second)


def _by_path(name: str, texts: str | list[str]) -> dict[str, str]:
    if isinstance(texts, str):
        return {name: texts}
    return {f"{name}.{index}": text for index, text in enumerate(texts)}
