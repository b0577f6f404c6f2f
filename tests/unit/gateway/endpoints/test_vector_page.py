"""Requests for vectors with any values: all that openapi.json allows, and odd ones."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.support.openapi_examples import offered_bodies
from tests.unit.gateway.endpoints.vector_gateway import VectorGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "embedder", "input": "t5"},
    "/pooling": {"model": "both", "input": "t5"},
    "/classify": {"model": "classifier", "input": "t5"},
    "/v1/rerank": {"model": "ranker", "query": "t5", "documents": ["t6"]},
    "/v2/rerank": {"model": "embedder", "query": "t5", "documents": ["t6"]},
    "/score": {"model": "ranker", "text_1": "t5", "text_2": "t6"},
}
CHAT = {"messages": [{"role": "user", "content": "t5"}], "input": None}
TOGETHER: dict[str, dict[str, Any]] = {
    "messages": {"input": None},
    "chat_template_kwargs": CHAT,
    "continue_final_message": CHAT,
    "queries": {"text_1": None, "text_2": None, "documents": "t6"},
    "documents": {"text_1": None, "text_2": None, "queries": "t5"},
}
# What depends on the model.
OF_THE_MODEL = (
    "the model ",
    "dimensions is 2147483647",
    "prompt_name is ",
    "allowed: -1, or at least",
    "allowed: null, as scores have no dimensions",
)


@pytest.mark.parametrize("path", BODIES)
async def test_page_offers_only_what_is_accepted(gateway: VectorGateway, path: str) -> None:
    page = (await gateway.http.get("/openapi.json")).json()
    bodies = offered_bodies(page, path, BODIES[path], TOGETHER)
    places = asyncio.Semaphore(16)

    async def refusal(body: dict[str, Any]) -> str:
        async with places:
            answer = await gateway.http.post(path, json=body)
        if answer.status_code == 200 or any(map(answer.text.__contains__, OF_THE_MODEL)):
            return ""
        return f"{body}: {answer.status_code} {answer.text}"

    refused = list(filter(None, await asyncio.gather(*map(refusal, bodies))))
    assert not refused, "\n".join(refused)


ODD: list[Any] = [
    *(None, True, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1e308, "", "x", "t5 t6", "\u202e\x00"),
    *([], [None], [1], [[1]], [[]], ["t5"], ["t5", ["t6"]], [{"text": "t5"}], [[[1]]], {}),
    *({"text": "t5"}, {"text": None}, {"role": "user", "content": "t5"}, "t5 " * 5000),
    [{"role": "user", "content": "t5"}],
    ["t5"] * 3000,
    [2**40] * 3,
    [999] * 200,
]


@pytest.mark.parametrize("path", BODIES)
async def test_odd_fields_are_answered_or_refused(gateway: VectorGateway, path: str) -> None:
    """Draws the same bodies each time: each has one to three fields with odd values."""
    page = (await gateway.http.get("/openapi.json")).json()
    content = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    names = sorted(page["components"]["schemas"][name]["properties"])
    rng = random.Random(1)
    bodies = [
        BODIES[path] | {each: rng.choice(ODD) for each in rng.sample(names, rng.randint(1, 3))}
        for _ in range(150)
    ]
    places = asyncio.Semaphore(16)

    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with places:
            response = await gateway.http.post(path, json=body)
        return response.status_code, response.json()

    answers = await asyncio.gather(*map(answer, bodies))
    assert {200, 400} <= {status for status, _ in answers} <= {200, 400, 404}
    for status, found in answers:
        assert status == 200 or found["error"].keys() == {"message", "type", "param", "code"}
        assert status != 400 or found["error"]["type"] == "invalid_request_error"
