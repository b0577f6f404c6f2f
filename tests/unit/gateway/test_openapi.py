"""The OpenAPI page, against a validator of its own."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from splitserve_gateway.app import build_app
from splitserve_gateway.config import GatewayConfig

PAGE: dict[str, Any] = build_app(GatewayConfig()).openapi()


def body_schema(path: str) -> dict[str, Any]:
    schema = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": PAGE["components"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "stop": ["b"], "logit_bias": {"5": 1}}),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "temperature": 0.5, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        ),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_page_describes_bodies_that_are_accepted(path: str, body: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(body_schema(path)).validate(body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": "a", "frobnicate": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "alien", "content": "a"}]}),
        ("/detokenize", {}),
    ],
)
def test_page_does_not_describe_bodies_that_are_refused(path: str, body: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(body_schema(path)).is_valid(body)


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
