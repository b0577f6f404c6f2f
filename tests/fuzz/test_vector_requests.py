"""Random bodies and forms to endpoints of vectors and audio get no status 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_gateway.schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TranscriptionRequest,
)
from tests.fuzz.mutations import json_values, mutated
from tests.fuzz.running import Running, fuzzing, running
from tests.unit.gateway.endpoints.vector_gateway import VectorGateway, vector_gateway

SCHEMAS: dict[str, Any] = {
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/score": ScoreRequest,
    "/classify": ClassifyRequest,
    "/pooling": PoolingRequest,
}
VALID: dict[str, dict[str, object]] = {
    "/v1/embeddings": {"model": "embedder", "input": "t1 t2"},
    "/v1/rerank": {"model": "ranker", "query": "t1", "documents": ["t2", {"text": "t3"}]},
    "/v2/rerank": {"model": "embedder", "query": "t1", "documents": ["t2"]},
    "/score": {"model": "ranker", "text_1": "t1", "text_2": ["t2", "t3"]},
    "/classify": {"model": "classifier", "input": [[1, 2], [3]]},
    "/pooling": {"model": "both", "messages": [{"role": "user", "content": "t1"}]},
}
TRANSCRIPTIONS = "/v1/audio/transcriptions"
_BOUNDARY = "b"
_PART = f"--{_BOUNDARY}\r\ncontent-disposition: form-data; name="
_FORM = (
    f'{_PART}"language"\r\n\r\nen\r\n{_PART}"file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    f"--{_BOUNDARY}--\r\n"
).encode()
_names_of_forms = st.sampled_from([*TranscriptionRequest.model_fields, "file", "stream[]", ""])


async def check(gateway: VectorGateway, path: str, content: bytes, media_type: str) -> None:
    """Whatever is sent, the answer is no fault of the gateway."""
    response = await gateway.http.post(path, content=content, headers={"content-type": media_type})
    assert response.status_code < 500, response.text


@pytest.fixture(scope="module")
def target() -> Iterator[Running[VectorGateway]]:
    with running(vector_gateway()) as started:
        yield started
        for path, body in VALID.items():
            sent = json.dumps(body).encode()
            started.run(check(started.target, path, sent, "application/json"))


@fuzzing
@given(data=st.data(), path=st.sampled_from(sorted(SCHEMAS)))
def test_vectors_are_computed_or_refused_when_fields_are_anything(
    target: Running[VectorGateway], data: st.DataObject, path: str
) -> None:
    names = st.sampled_from(sorted(SCHEMAS[path].model_fields.keys() - {"deadline_s"}))
    changes = data.draw(st.dictionaries(names, json_values, min_size=1, max_size=4))
    sent = json.dumps(VALID[path] | changes).encode()

    target.run(check(target.target, path, sent, "application/json"))


@fuzzing
@given(data=st.data(), path=st.sampled_from(sorted(VALID)))
def test_vectors_are_computed_or_refused_when_bytes_are_anything(
    target: Running[VectorGateway], data: st.DataObject, path: str
) -> None:
    sent = data.draw(mutated(json.dumps(VALID[path]).encode()))

    target.run(check(target.target, path, sent, "application/json"))


@fuzzing
@given(fields=st.lists(st.tuples(_names_of_forms, st.text(max_size=8)), max_size=4))
def test_form_is_refused_when_its_fields_are_anything(
    target: Running[VectorGateway], fields: list[tuple[str, str]]
) -> None:
    parts = "".join(f'{_PART}"{name}"\r\n\r\n{value}\r\n' for name, value in fields)
    media_type = f"multipart/form-data; boundary={_BOUNDARY}"

    target.run(check(target.target, TRANSCRIPTIONS, parts.encode() + _FORM, media_type))


@fuzzing
@given(sent=mutated(_FORM), media_type=st.sampled_from(["b", '"b"', "", "b; charset=x", "-" * 90]))
def test_form_is_refused_when_its_bytes_are_anything(
    target: Running[VectorGateway], sent: bytes, media_type: str
) -> None:
    kind = f"multipart/form-data; boundary={media_type}"

    target.run(check(target.target, TRANSCRIPTIONS, sent, kind))
