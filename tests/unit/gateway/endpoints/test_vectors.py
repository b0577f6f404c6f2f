"""Embeddings, classes and vectors of any kind, before schedulers that compute known vectors."""

from __future__ import annotations

import asyncio
import struct
from base64 import b64decode
from typing import Any

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError
from tests.support.fakes import fake_scheduler
from tests.support.processes.gateway import until
from tests.unit.gateway.endpoints.vector_gateway import (
    CLS,
    KINDS,
    SEP,
    VectorGateway,
    ids,
    text,
    vector,
    vector_gateway,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/embeddings"
MAX_MODEL_LEN = 128


def titled(*words: int) -> list[int]:
    """Tokens of a text behind the default prompt."""
    return ids(3, *words)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (text(5, 6), [titled(5, 6)]),
        ([text(5), text(6, 7), text(5)], [titled(5), titled(6, 7), titled(5)]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
    ids=["text", "texts", "tokens", "lists"],
)
async def test_embeddings_are_in_the_order_of_the_input(
    gateway: VectorGateway, given: object, prompts: list[list[int]]
) -> None:
    answer = await gateway.post(PATH, "embedder", input=given, request_id="mine")

    assert sorted(gateway.prompts("embedder")) == sorted(prompts)
    num_tokens = sum(map(len, prompts))
    assert answer.pop("usage") == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer.pop("created") > 0
    data = answer.pop("data")
    assert answer == {"id": "embd-mine", "object": "list", "model": "embedder"}
    for index, (entry, prompt) in enumerate(zip(data, prompts, strict=True)):
        assert (entry["object"], entry["index"]) == ("embedding", index)
        assert entry["embedding"] == pytest.approx(vector("embedder", prompt), rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "pooling"),
    [
        ({"dimensions": 3}, {"num_dimensions": 3}),
        ({"normalize": False}, {"raw": True}),
        ({"use_activation": False, "dimensions": 8}, {"raw": True, "num_dimensions": 8}),
        ({"normalize": True, "dimensions": None, "encoding_format": None}, {}),
    ],
)
async def test_embedding_is_as_asked_for(
    gateway: VectorGateway, fields: dict[str, Any], pooling: dict[str, Any]
) -> None:
    answer = await gateway.post(PATH, "embedder", input=[7], **fields)
    (request,) = gateway.fakes["embedder"].requests
    task = api.POOLING_TASK_EMBEDDING
    assert request.sampling_params.pooling == api.PoolingParams(task=task, **pooling)
    expected = vector("embedder", [7], **pooling)
    assert answer["data"][0]["embedding"] == pytest.approx(expected, rel=1e-6)


async def test_base64_has_the_same_numbers(gateway: VectorGateway) -> None:
    given = {"input": [[7], [8]]}
    plain = await gateway.post(PATH, "embedder", **given)
    packed = await gateway.post(PATH, "embedder", encoding_format="base64", **given)
    for one, other in zip(plain["data"], packed["data"], strict=True):
        assert list(struct.unpack("<8f", b64decode(other["embedding"]))) == one["embedding"]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt_name": "query"}, ids(1, 1, 5, 6)),
        ({"prompt_name": "document"}, ids(2, 5, 6)),
        ({"add_special_tokens": False}, [3, 5, 6]),
        ({"truncate_prompt_tokens": 4}, ids(3, 5)),
        ({"truncate_prompt_tokens": 2, "add_special_tokens": False}, [3, 5]),
        ({"truncate_prompt_tokens": -1}, titled(5, 6)),
    ],
)
async def test_text_is_encoded_as_asked_for(
    gateway: VectorGateway, fields: dict[str, Any], prompt: list[int]
) -> None:
    await gateway.post(PATH, "embedder", input=text(5, 6), **fields)
    assert gateway.prompts("embedder") == [prompt]


@pytest.mark.parametrize("given", [text(*range(2, 300)), list(range(2, 300))])
async def test_long_input_is_cut_to_the_model_or_refused(
    gateway: VectorGateway, given: str | list[int]
) -> None:
    await gateway.post(PATH, "embedder", input=given, truncate_prompt_tokens=-1)
    ((first, *middle, last),) = gateway.prompts("embedder")
    assert len(middle) == MAX_MODEL_LEN - 2
    if isinstance(given, str):
        assert (first, middle[:3], last) == (CLS, [3, 2, 3], SEP)
    else:
        assert [first, *middle, last] == given[:MAX_MODEL_LEN]

    error = await gateway.refusal(PATH, "embedder", input=[[1], given] if first == 2 else given)
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 128 tokens" in error["message"]
    assert error["message"].startswith(f"prompt is too long: {error['param']} has ")
    assert gateway.prompts("embedder") == []


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ""}, "input", "input is empty; allowed: 1 character or more"),
        ({"input": []}, "input", "input has no tokens; allowed: 1 or more"),
        ({"input": ["a", ""]}, "input.1", "input.1 is empty"),
        ({"input": [[1], []]}, "input.1", "input.1 has no tokens"),
        ({"input": " ", "prompt_name": "blank", "add_special_tokens": False}, "input", "no tokens"),
        ({"input": ["a"] * 100_000}, "input", "at most 2048 items"),
        ({"input": [[1]] * 2049}, "input", "at most 2048 items after validation, not 2049"),
        ({"input": [["a"]]}, "input.0.0", "valid integer"),
        ({"input": [[1], "a"]}, "input.1", "valid array"),
        ({"input": ["a", [1]]}, "input.1", "valid string"),
        ({"input": [1, -1]}, "input.1", "greater than or equal to 0"),
        ({"input": [[1], [1000]]}, "input.1", "input.1 has 1000; allowed: token ids below 1000"),
        ({"input": [10**30]}, "input.0", ""),
        ({"input": [1.5]}, "input.0", "valid integer"),
        ({"input": [True]}, "input.0", "valid integer"),
        ({"input": {"a": 1}}, "input", "valid string or a list"),
        ({"input": None}, "input", "valid string or a list"),
        ({}, "input", "input is required"),
        ({"input": [[[[[[1]]]]]]}, "input.0.0", "valid integer"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions is 9; allowed: 1 to 8"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "at least 3"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "'query', 'document', 'title'"),
        ({"input": [1], "prompt_name": "query"}, "prompt_name", "combined with token ids"),
        ({"input": "a", "frob": 1}, "frob", "unknown field"),
        ({"input": "a", "user": 1}, "user", "valid string"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
    ],
)
async def test_bad_field_is_named(
    gateway: VectorGateway, fields: dict[str, Any], param: str, said: str
) -> None:
    error = await gateway.refusal(PATH, "embedder", **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]
    assert gateway.prompts("embedder") == []


@pytest.mark.parametrize(
    "content", ["{", '{"input": "a"', '{"input": NaN}', '{"input": [1e999]}', "[" * 300, "null", ""]
)
async def test_broken_json_is_refused(gateway: VectorGateway, content: str) -> None:
    headers = {"content-type": "application/json"}
    response = await gateway.http.post(PATH, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "model", "said"),
    [
        (
            PATH,
            "writer",
            "returns text and no vectors; allowed: POST /v1/completions, POST ",
        ),
        ("/classify", "writer", "returns text and no vectors"),
        ("/pooling", "writer", "returns text and no vectors"),
        (
            PATH,
            "ranker",
            "has no embeddings; allowed: POST /v1/rerank, POST /score, POST /cla",
        ),
        (PATH, "classifier", "has no embeddings; allowed: POST /classify, POST /pooling"),
        (
            "/classify",
            "embedder",
            "no labels to score; allowed: POST /v1/embeddings, POST /v1/rer",
        ),
        ("/v1/completions", "embedder", "returns vectors and no text; allowed: POST /v1/emb"),
        ("/v1/chat/completions", "ranker", "returns vectors and no text; allowed: POST /v1/rerank"),
        ("/v1/responses", "both", "returns vectors and no text"),
    ],
)
async def test_other_kind_of_model_is_refused(
    gateway: VectorGateway, path: str, model: str, said: str
) -> None:
    fields: dict[str, Any] = {"input": "t5"}
    if path == "/v1/completions":
        fields = {"prompt": "t5"}
    elif path == "/v1/chat/completions":
        fields = {"messages": [{"role": "user", "content": "t5"}]}
    error = await gateway.refusal(path, model, **fields)
    assert error["param"] == "model"
    assert f"the model '{model}'" in error["message"]
    assert said in error["message"]


async def test_request_without_model_gets_a_model_of_its_kind(gateway: VectorGateway) -> None:
    for path, body, models in (
        (PATH, {"input": [5]}, {"embedder", "both", "bare"}),
        ("/classify", {"input": [5]}, {"classifier", "ranker", "both"}),
        ("/pooling", {"input": [5]}, KINDS.keys() - {"writer"}),
        ("/v1/completions", {"prompt": [5], "max_tokens": 1}, {"writer"}),
    ):
        for _ in range(3):
            answer = (await gateway.http.post(path, json=body)).json()
            assert answer["model"] in models


async def test_models_and_tokens_are_as_of_any_model(gateway: VectorGateway) -> None:
    models = (await gateway.http.get("/v1/models")).json()["data"]
    assert {model["id"] for model in models} == KINDS.keys()
    tokens = await gateway.post("/tokenize", "embedder", prompt=text(5, 6))
    assert tokens["tokens"] == ids(5, 6)


# -- Classes, and vectors of any kind --------------------------------------------------------------


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_classes_have_the_most_probable_label(gateway: VectorGateway, path: str) -> None:
    answer = await gateway.post(path, "classifier", input=[text(5, 6), text(8)])

    assert (answer["object"], answer["model"]) == ("list", "classifier")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    labels = KINDS["classifier"].labels  # type: ignore[union-attr]
    for index, (entry, prompt) in enumerate(zip(answer["data"], (ids(5, 6), ids(8)), strict=True)):
        expected = vector("classifier", prompt)
        assert entry["probs"] == pytest.approx(expected, rel=1e-6)
        assert entry["label"] == labels[expected.index(max(expected))]
        assert (entry["index"], entry["num_classes"]) == (index, 3)


async def test_classes_are_raw_when_no_activation_is_wanted(gateway: VectorGateway) -> None:
    answer = await gateway.post("/classify", "ranker", input=[5], use_activation=False)
    assert answer["data"][0]["probs"] == pytest.approx(vector("ranker", [5], raw=True), rel=1e-6)
    assert answer["data"][0]["label"] == "LABEL_0"


@pytest.mark.parametrize(
    ("model", "task", "kind"),
    [
        ("embedder", None, api.POOLING_TASK_EMBEDDING),
        ("classifier", None, api.POOLING_TASK_SCORES),
        ("both", None, api.POOLING_TASK_EMBEDDING),
        ("both", "embed", api.POOLING_TASK_EMBEDDING),
        ("both", "classify", api.POOLING_TASK_SCORES),
    ],
)
async def test_pooling_returns_what_the_model_has(
    gateway: VectorGateway, model: str, task: str | None, kind: int
) -> None:
    answer = await gateway.post("/pooling", model, input=[[5], [6]], task=task)
    for index, entry in enumerate(answer["data"]):
        expected = vector(model, [5 + index], task=kind)
        assert (entry["object"], entry["index"]) == ("pooling", index)
        assert entry["data"] == pytest.approx(expected, rel=1e-6)


async def test_pooling_reads_a_chat(gateway: VectorGateway) -> None:
    messages = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t6"}]
    await gateway.post("/pooling", "embedder", messages=messages)
    assert gateway.prompts("embedder") == [[5, 6]]


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("embedder", {"input": "a", "task": "classify"}, "model"),
        ("classifier", {"input": "a", "task": "embed"}, "model"),
        ("classifier", {"input": "a", "dimensions": 2}, "dimensions"),
        ("embedder", {"input": "a", "task": "encode"}, "task"),
        ("embedder", {}, "input"),
        ("embedder", {"input": "a", "messages": []}, "input"),
        ("embedder", {"messages": []}, "messages"),
        ("embedder", {"messages": [{"role": "user", "content": "a"}], "prompt_name": "query"},
         "prompt_name"),
    ],
)  # fmt: skip
async def test_pooling_names_the_bad_field(
    gateway: VectorGateway, model: str, fields: dict[str, Any], param: str
) -> None:
    assert (await gateway.refusal("/pooling", model, **fields))["param"] == param


# -- At the scheduler ------------------------------------------------------------------------------


async def test_scheduling_fields_reach_the_scheduler(gateway: VectorGateway) -> None:
    fields = {"user": "u", "priority": 7, "cache_salt": "salt", "deadline_s": 60}
    await gateway.post(PATH, "embedder", input=[5], request_id="mine", **fields)
    (request,) = gateway.fakes["embedder"].requests
    assert (request.tenant, request.priority, request.cache_salt) == ("u", 7, "salt")
    assert request.HasField("deadline")
    assert request.request_id.startswith("mine.")
    assert request.model_digest == "embedder"


@pytest.mark.parametrize("is_single", [False, True])
async def test_refused_input_is_named_and_ends_the_others(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch, is_single: bool
) -> None:
    fake = gateway.fakes["embedder"]
    waits = asyncio.Event()

    def refuse(request: api.GenerateRequest) -> None:
        if 7 in request.prompt_token_ids:
            raise DomainError("PROMPT_TOO_LONG", "prompt_token_ids has 1 token; allowed: 0")

    monkeypatch.setattr(fake, "before_request", refuse)
    monkeypatch.setattr(fake, "hold", waits)
    given = [7] if is_single else [[number] for number in range(2, 9)]
    error = await gateway.refusal(PATH, "embedder", input=given)

    param = "input" if is_single else "input.5"
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"] == f"prompt is too long: {param} has 1 token; allowed: 0"
    await all_aborted(gateway)


async def test_request_that_an_operator_ended_is_not_to_be_retried(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = api.Finish(reason=api.FINISH_REASON_ABORTED)
    monkeypatch.setattr(fake_scheduler, "make_vector", lambda *_: aborted)
    response = await gateway.http.post(PATH, json={"model": "embedder", "input": "t5"})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "aborted"


async def test_model_without_tokenizer_reads_token_ids(gateway: VectorGateway) -> None:
    answer = await gateway.post(PATH, "bare", input=[5, 6], truncate_prompt_tokens=1)
    expected = vector("bare", [5])
    assert answer["data"][0]["embedding"] == pytest.approx(expected, rel=1e-6)
    for path, fields in ((PATH, {"input": "t5"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        error = await gateway.refusal(path, "bare", **fields)
        assert error["code"] == "tokenizer_unavailable"
        assert "allowed: token ids in input of POST /v1/embeddings" in error["message"]


async def test_disconnect_aborts_all_inputs(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = gateway.fakes["embedder"]
    monkeypatch.setattr(fake, "hold", asyncio.Event())
    asking = asyncio.create_task(gateway.post(PATH, "embedder", input=[[n] for n in range(300)]))
    await until(lambda: len(fake.requests) == 256)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await all_aborted(gateway)
    assert len(fake.requests) == 256


async def all_aborted(gateway: VectorGateway) -> None:
    await until(lambda: gateway.fleet.num_session_requests == 0)


async def test_field_of_other_services_is_named_when_it_has_no_effect(
    gateway: VectorGateway,
) -> None:
    bodies: dict[str, Any] = {
        PATH: {"input": "t1"},
        "/v1/rerank": {"query": "t1", "documents": ["t2"]},
    }
    for path, body in bodies.items():
        sent = {"model": "embedder", **body, "keep_alive": "5m", "frob": None}
        response = await gateway.http.post(path, json=sent)
        assert response.status_code == 200, response.text
        assert response.headers["x-splitserve-ignored-fields"] == "keep_alive"


async def test_unknown_field_of_a_form_or_body_is_named_when_so_configured() -> None:
    async with vector_gateway(unknown_fields="ignore") as gateway:
        response = await gateway.http.post(PATH, json={"model": "bare", "input": [1], "frob": 1})
        assert response.headers["x-splitserve-ignored-fields"] == "frob"
        form: Any = {"data": {"frob": "1"}, "files": {"file": ("a.wav", b"RIFF")}}
        error = (await gateway.http.post("/v1/audio/transcriptions", **form)).json()["error"]
        assert "frob" not in error["message"]
