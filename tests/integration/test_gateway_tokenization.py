"""`/tokenize`, `/detokenize` and `/v1/models` through a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "the fox, Grüße 🦊"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path_factory.mktemp("files"))) as running:
        yield running


async def test_tokens_are_those_of_the_tokenizer_and_lead_back(gateway: RunningGateway) -> None:
    for text in (TEXT, TEXT * 500):
        answer = await gateway.post("/tokenize", prompt=text, return_token_strs=True)
        assert answer["tokens"] == gateway.tokenizer.encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 1024
        assert answer["token_strs"][0] == "the"
        back = await gateway.post("/detokenize", tokens=answer["tokens"])
        assert back == {"prompt": text}


async def test_special_tokens_are_shown_unless_they_are_to_be_skipped(
    gateway: RunningGateway,
) -> None:
    tokens = [0, *gateway.tokenizer.encode("fox"), 1]
    assert (await gateway.post("/detokenize", tokens=tokens))["prompt"] == "<s>fox</s>"
    answer = await gateway.post("/detokenize", tokens=tokens, skip_special_tokens=True)
    assert answer["prompt"] == "fox"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "frobnicate": 1}, "frobnicate"),
        ("/tokenize", {"prompt": "a" * 300_000}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_field_is_refused_by_name_when_it_cannot_be(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    assert (await gateway.refusal(path, body))["param"] == param


async def test_models_are_listed_and_found_by_id(gateway: RunningGateway) -> None:
    listed = (await gateway.http.get("/v1/models")).json()
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 1024)
    assert (await gateway.http.get("/v1/models/fake")).json() == model
    response = await gateway.http.get("/v1/models/some/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
