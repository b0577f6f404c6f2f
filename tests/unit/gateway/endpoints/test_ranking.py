"""Rankings and scores of pairs, by classifiers with one label and by embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitserve_gateway.generation import vectors
from tests.unit.gateway.endpoints.vector_gateway import (
    CLS,
    SEP,
    VectorGateway,
    ids,
    text,
    vector,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUERY = (5, 6)
DOCUMENTS = [(10,), (11, 12), (13,), (11, 12), (14, 15, 16)]
TEXTS = [text(*words) for words in DOCUMENTS]
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def pair(first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
    return [CLS, *first, SEP, *second, SEP]


def label_score(first: tuple[int, ...], second: tuple[int, ...], **pooling: Any) -> float:  # noqa: ANN401
    """Score of a pair by the classifier; the second text starts behind the first separator."""
    start = len(first) + 2
    return vector("ranker", pair(first, second), second_text_start=start, **pooling)[0]


def cosine(first: list[int], second: list[int]) -> float:
    one, other = (np.array(vector("embedder", each)) for each in (first, second))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def order_of(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


SCORES = {
    "ranker": [label_score(QUERY, words) for words in DOCUMENTS],
    "embedder": [cosine(ids(1, 1, *QUERY), ids(2, *words)) for words in DOCUMENTS],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", SCORES)
async def test_documents_are_ordered_by_score_then_by_place(
    gateway: VectorGateway, model: str, path: str
) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    answer = await gateway.post(path, model, query=text(*QUERY), documents=documents)

    results = answer["results"]
    assert [result["index"] for result in results] == order_of(SCORES[model])
    for result in results:
        assert result["relevance_score"] == pytest.approx(SCORES[model][result["index"]], rel=1e-5)
        document = result.get("document")
        assert document == (None if path == "/v2/rerank" else {"text": TEXTS[result["index"]]})


@pytest.mark.parametrize("model", SCORES)
async def test_equal_documents_keep_their_order(gateway: VectorGateway, model: str) -> None:
    answer = await gateway.post("/rerank", model, query="t5", documents=["t9"] * 9)
    assert [result["index"] for result in answer["results"]] == list(range(9))


async def test_answer_is_that_of_jina_and_of_cohere(gateway: VectorGateway) -> None:
    asked: dict[str, Any] = {"query": text(*QUERY), "documents": TEXTS, "request_id": "mine"}
    num_tokens = sum(len(pair(QUERY, words)) for words in DOCUMENTS)
    jina = await gateway.post("/v1/rerank", "ranker", **asked)
    cohere = await gateway.post("/v2/rerank", "ranker", **asked)

    assert jina.keys() == {"id", "model", "results", "usage"}
    assert (jina["id"], jina["model"]) == ("rerank-mine", "ranker")
    assert jina["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert cohere.keys() == {"id", "results", "meta"}
    assert cohere["meta"]["tokens"] == {"input_tokens": num_tokens, "output_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "count", "with_documents"),
    [
        ({"top_n": 2}, 2, True),
        ({"top_n": 99}, 5, True),
        ({"return_documents": False}, 5, False),
        ({"return_documents": True, "top_n": 1}, 1, True),
    ],
)
async def test_results_are_as_asked_for(
    gateway: VectorGateway, fields: dict[str, Any], count: int, with_documents: bool
) -> None:
    asked = {"query": text(*QUERY), "documents": TEXTS, **fields}
    answer = await gateway.post("/v1/rerank", "ranker", **asked)
    found = [result["index"] for result in answer["results"]]
    assert found == order_of(SCORES["ranker"])[:count]
    assert all(("document" in result) == with_documents for result in answer["results"])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"max_tokens_per_doc": 2}, pair((5, 6), (14, 15))),
        ({"truncate_prompt_tokens": 7}, pair((5, 6), (14, 15))),
        ({"truncate_prompt_tokens": -1}, pair((5, 6), (14, 15, 16))),
    ],
)
async def test_document_is_cut_as_asked_for(
    gateway: VectorGateway, fields: dict[str, Any], kept: list[int]
) -> None:
    asked = {"query": "t5 t6", "documents": [text(14, 15, 16)], **fields}
    await gateway.post("/rerank", "ranker", **asked)
    assert gateway.prompts("ranker") == [kept]


async def test_long_texts_are_cut_to_the_model(gateway: VectorGateway) -> None:
    long = text(*range(1, 800)) + " " + text(*range(1, 800))
    asked = {"query": long, "documents": [long, "t9"], "truncate_prompt_tokens": -1}
    await gateway.post("/rerank", "ranker", **asked)
    (other, one) = sorted(gateway.prompts("ranker"))
    assert one == pair(tuple(range(1, 63)), tuple(range(1, 64)))
    assert other == pair(tuple(range(1, 125)), (9,))

    error = await gateway.refusal("/rerank", "ranker", query="t1", documents=["t2", long])
    assert (error["param"], error["code"]) == ("documents.1", "context_length_exceeded")
    assert error["message"].startswith("prompt is too long: documents.1 has ")


async def test_tokens_of_all_pairs_are_bounded(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "MAX_TOKENS", 20)
    asked = {"query": text(*range(1, 6)), "documents": ["t9"] * 3}
    error = await gateway.refusal("/rerank", "ranker", **asked)
    assert error["param"] == "documents.2"
    assert "have 27 tokens; allowed: at most 20 in a request" in error["message"]
    assert gateway.prompts("ranker") == []


async def test_embedded_documents_are_cut_without_their_special_tokens(
    gateway: VectorGateway,
) -> None:
    documents = [text(14, 15, 16)]
    await gateway.post("/rerank", "embedder", query="t5", documents=documents, max_tokens_per_doc=3)
    assert gateway.prompts("embedder") == [ids(1, 1, 5), ids(2, 14, 15)]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"documents": ["a"]}, "query", "query is required"),
        ({"query": "a"}, "documents", "documents is required"),
        ({"query": "", "documents": ["a"]}, "query", "query is empty"),
        ({"query": "a", "documents": []}, "documents", "at least 1 item"),
        ({"query": "a", "documents": ["a", ""]}, "documents.1", "documents.1 is empty"),
        ({"query": "a", "documents": ["a", None]}, "documents.1", "valid string"),
        ({"query": "a", "documents": None}, "documents", "valid array"),
        ({"query": "a", "documents": "a"}, "documents", "valid array"),
        ({"query": "a", "documents": [{"text": None}]}, "documents.0.text", "valid string"),
        ({"query": "a", "documents": [{"txt": "a"}]}, "documents.0.text", "is required"),
        ({"query": "a", "documents": [{"text": "a", "b": 1}]}, "documents.0.b", "unknown field"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents", "at most 2048 items"),
        ({"query": ["a"], "documents": ["a"]}, "query", "valid string"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"query": "a", "documents": ["a"], "top_n": 10**20}, "top_n", "less than"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", ""),
        ({"query": "a", "documents": ["a"], "truncate_prompt_tokens": 3},
         "truncate_prompt_tokens", "allowed: -1, or at least 4"),
        ({"query": "a", "documents": ["a"], "relevant_spans": {}}, "relevant_spans", "supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
async def test_bad_field_is_named(
    gateway: VectorGateway, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    error = await gateway.refusal(path, "ranker", **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]
    assert gateway.prompts("ranker") == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "classifier",
            "scores 3 labels, and not how well two texts match; allowed: POST /cl",
        ),
        ("writer", "returns text and no vectors"),
    ],
)
@pytest.mark.parametrize("path", [*PATHS, "/score", "/v1/score"])
async def test_model_without_scores_of_pairs_is_refused(
    gateway: VectorGateway, path: str, model: str, said: str
) -> None:
    fields: dict[str, Any] = {"query": "a", "documents": ["a"]}
    if path.endswith("score"):
        fields = {"text_1": "a", "text_2": "a"}
    error = await gateway.refusal(path, model, **fields)
    assert error["param"] == "model"
    assert said in error["message"]


# -- Scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("t5", "t6", [(5, 6)]),
        ("t5", ["t6", "t7"], [(5, 6), (5, 7)]),
        (["t5"], ["t6", "t7"], [(5, 6), (5, 7)]),
        (["t5", "t8"], ["t6", "t7"], [(5, 6), (8, 7)]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize("model", ["ranker", "embedder"])
async def test_scores_are_of_each_pair(
    gateway: VectorGateway,
    model: str,
    names: tuple[str, str],
    first: object,
    second: object,
    pairs: list[tuple[int, int]],
) -> None:
    answer = await gateway.post("/score", model, **dict(zip(names, (first, second), strict=True)))

    assert (answer["object"], answer["model"]) == ("list", model)
    assert answer["id"].startswith("score-")
    assert answer["usage"]["total_tokens"] == sum(map(len, gateway.prompts(model)))
    for index, (entry, (one, other)) in enumerate(zip(answer["data"], pairs, strict=True)):
        expected = (
            label_score((one,), (other,))
            if model == "ranker"
            else cosine(ids(3, one), ids(3, other))
        )
        assert (entry["object"], entry["index"]) == ("score", index)
        assert entry["score"] == pytest.approx(expected, rel=1e-5)


async def test_score_is_raw_when_no_activation_is_wanted(gateway: VectorGateway) -> None:
    answer = await gateway.post(
        "/v1/score", "ranker", text_1="t5", text_2="t6", use_activation=False
    )
    expected = label_score((5,), (6,), raw=True)
    assert answer["data"][0]["score"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "text_1", "none of them given; allowed: text_1 and text_2, or queries and documents"),
        ({"text_1": "a"}, "text_1", "text_1 given; allowed"),
        ({"text_1": "a", "documents": "a"}, "text_1", "text_1 and documents given"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "has 2 texts and text_2 3"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_1", "has 2 texts and text_2 1"),
        ({"queries": "a", "documents": ["a", ""]}, "documents.1", "is empty"),
        ({"text_1": [], "text_2": "a"}, "text_1", "at least 1 item"),
        ({"text_1": [1], "text_2": "a"}, "text_1.0", "valid string"),
        ({"text_1": {}, "text_2": "a"}, "text_1", "valid string"),
    ],
)
async def test_bad_pairs_are_refused(
    gateway: VectorGateway, fields: dict[str, Any], param: str, said: str
) -> None:
    error = await gateway.refusal("/score", "ranker", **fields)
    assert error["param"] == param
    assert said in error["message"]
