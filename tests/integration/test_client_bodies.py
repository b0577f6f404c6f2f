"""Requests of well-known clients, as recorded by `tests/clients/matrix/run.py`, are answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from executor_service.steps import SAMPLING_FEATURES, Feature
from tests.support.processes.forked import ROOT
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor
from tests.unit.gateway.endpoints.vector_gateway import vector_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
RECORDED = sorted((ROOT / "tests" / "clients" / "matrix" / "bodies").glob("*.json"))
TEMPLATE = "{% for message in messages %}{{ message }}\n{% endfor %}{{ tools }}{# <tool_call> #}"
EMBEDDINGS = "/v1/embeddings"
# What the gateway may say that it ignores.
IGNORED = {
    "input.content.annotations", "input.content.logprobs", "input.id", "input.status",
    "messages.content.cache_control", "metadata", "store", "text.verbosity", "tools.cache_control",
    "truncation", "usage", "verbosity",
}  # fmt: skip
LENGTHS = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}


def recorded() -> list[Any]:
    return [
        pytest.param(path, body, id=f"{file.stem} {number}")
        for file in RECORDED
        for number, (path, body) in enumerate(json.loads(file.read_text(encoding="utf-8")))
    ]


CASES = recorded()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    executor = text_executor(
        tmp_path_factory.mktemp("files"),
        TEMPLATE,
        features=SAMPLING_FEATURES | {Feature.GRAMMAR},
        eos_token_ids=(1,),
        max_model_len=8192,
        num_device_blocks=8192,
    )
    async with running_gateway(executor) as running:
        yield running


@pytest.mark.parametrize(("path", "body"), [case for case in CASES if case.values[0] != EMBEDDINGS])
async def test_request_is_answered_when_sent_as_a_client_does(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    response = await gateway.http.post(path, json={**body, LENGTHS[path]: 1})

    assert response.status_code == 200, response.text
    assert '"error":{' not in response.text
    ignored = response.headers.get("x-splitserve-ignored-fields")
    assert ignored is None or set(ignored.split(", ")) <= IGNORED


async def test_texts_are_embedded_when_sent_as_a_client_does() -> None:
    bodies = [case.values[1] for case in CASES if case.values[0] == EMBEDDINGS]
    assert len(bodies) >= 4
    async with vector_gateway() as gateway:
        for body in bodies:
            answer = await gateway.post(EMBEDDINGS, **{**body, "model": "embedder"})
            assert len(answer["data"]) == len(body["input"])
