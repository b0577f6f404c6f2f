"""The OpenAPI page, checked by a validator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.http import ApiError, ErrorFormat, invalid

PAGE: dict[str, Any] = build_app(GatewayConfig()).openapi()
COMPONENTS = {"components": PAGE["components"]}


def body_schema(path: str) -> dict[str, Any]:
    schema = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": PAGE["components"]}


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        ("/v1/completions", {"prompt": "a", "stop": ["b"], "logit_bias": {"5": 1}}, True),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "temperature": 0.5, "n": 2}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, True),
        ("/tokenize", {"prompt": "a"}, True),
        ("/detokenize", {"tokens": [1]}, True),
        ("/v1/completions", {"prompt": 5}, False),
        ("/v1/completions", {"prompt": "a", "frobnicate": 1}, False),
        ("/v1/chat/completions", {"messages": [{"role": "alien", "content": "a"}]}, False),
        ("/detokenize", {}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, True),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, False),
        ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 5}, True),
        ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}, True),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}, True),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, True),
        ("/score", {"queries": "a", "documents": ["b"]}, True),
        ("/pooling", {"messages": [{"role": "user", "content": "a"}]}, True),
        ("/v1/embeddings", {"input": []}, False),
        ("/v1/rerank", {"query": "a", "documents": [None]}, False),
        ("/score", {"text_1": "a", "documents": "b"}, False),
        ("/pooling", {}, False),
    ],
)
def test_page_describes_bodies_that_are_accepted(
    path: str, body: dict[str, Any], is_valid: bool
) -> None:
    assert jsonschema.Draft202012Validator(body_schema(path)).is_valid(body) is is_valid


def test_page_has_every_reference_and_no_422() -> None:
    def references(value: object) -> list[str]:
        if isinstance(value, list):
            return [found for item in value for found in references(item)]
        if not isinstance(value, dict):
            return []
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in references(item)]

    names = {reference.removeprefix("#/components/schemas/") for reference in references(PAGE)}
    assert names <= PAGE["components"]["schemas"].keys()
    operations = [each for path in PAGE["paths"].values() for each in path.values()]
    assert not any("422" in operation["responses"] for operation in operations)


def test_page_closes_every_object_but_those_that_are_free() -> None:
    schemas = {k: v for k, v in PAGE["components"]["schemas"].items() if not k.endswith("Error")}
    closed = {"additionalProperties": False}
    assert all(schema.items() >= closed.items() for schema in schemas.values())
    properties = [item for schema in schemas.values() for item in schema["properties"].items()]
    told = ("Refused unless null.", "Accepted and ignored.")
    read = [item for item in properties if item[1].get("description") not in told]
    assert {name for name, schema in read if has_any_keys(schema)} == {
        "arguments", "chat_template_kwargs", "documents", "input", "input_schema", "parameters",
        "schema",
    }  # fmt: skip


def has_any_keys(schema: dict[str, Any]) -> bool:
    """Whether `schema`, not those it refers to, allows objects with whatever keys and values."""
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    inner += [schema["items"]] if "items" in schema else []
    if inner:
        return any(map(has_any_keys, inner))
    if schema.keys().isdisjoint(("type", "$ref", "const", "enum")):
        return True
    return schema.get("type") == "object" and schema.get("additionalProperties") is True


@pytest.mark.parametrize("path", PAGE["paths"])
def test_page_has_the_errors_of_what_answers_requests(path: str) -> None:
    for method, operation in PAGE["paths"][path].items():
        errors = {status: each for status, each in operation["responses"].items() if status >= "4"}
        if path.startswith("/health"):
            assert not errors
            continue
        expected = {"401", "403", "404", "429", "500", "503"}
        if method == "post":
            expected |= {"400", "408", "413", "415", "504"}
        assert errors.keys() == expected
        for error in errors.values():
            schema = {**error["content"]["application/json"]["schema"], **COMPONENTS}
            validator = jsonschema.Draft202012Validator(schema)
            form = ErrorFormat.of(path)
            validator.validate(ApiError(400, "invalid_request_error", "wrong").body(form, "req_1"))
            validator.validate(invalid("wrong", "prompt").body(form, "req_1"))
            assert not validator.is_valid({"message": "wrong"})


async def test_docs_list_every_path_and_load_nothing() -> None:
    transport = httpx2.ASGITransport(build_app(GatewayConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get("/docs")

    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == "default-src 'none'"
    assert all(f"<code>{path}</code>" in answer.text for path in PAGE["paths"])
    assert re.findall(r'(?:src|href)="([^"]*)"', answer.text) == ["openapi.json"]
    assert "<script" not in answer.text


async def test_page_says_where_a_credential_is_needed(tmp_path: Path) -> None:
    """As the door has it, without a scheduler: 401 where one is needed, and none was given."""
    key_file = tmp_path / "key"
    key_file.write_text("the-key-of-the-gateway")
    app = build_app(GatewayConfig(gateway_key_file=key_file))
    page = app.openapi()
    schemes = page["components"]["securitySchemes"]
    assert schemes["bearerAuth"].items() >= {"type": "http", "scheme": "bearer"}.items()
    assert schemes["apiKeyAuth"].items() >= {"in": "header", "name": "x-api-key"}.items()
    assert page["security"] == [{"bearerAuth": []}, {"apiKeyAuth": []}]
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client,
    ):
        for path, operations in page["paths"].items():
            for method, operation in operations.items():
                needed = operation.get("security", page["security"])
                answer = await client.request(method, path)
                assert (answer.status_code == 401) == (len(needed) == 2), path


def test_page_asks_for_no_credential_where_nobody_needs_one() -> None:
    assert "security" not in PAGE
    assert "securitySchemes" not in PAGE["components"]
