"""Grammars in request fields, and refusals by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitserve_gateway.grammars import ANY_OBJECT, Gbnf, GrammarRefused, requested_grammar
from splitserve_grammars import MAX_GRAMMAR_BYTES
from splitserve_text import Choices, JsonSchema, Lark, Regex

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}, "required": ["z"]}
AS_TEXT = json.dumps(SCHEMA)
GBNF = 'root ::= "a" | "b"'


def with_schema(**more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}


@pytest.mark.parametrize(
    ("body", "field", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", ANY_OBJECT),
        (
            {"response_format": with_schema(strict=True, description="d")},
            "response_format.json_schema.schema",
            JsonSchema(AS_TEXT),
        ),
        (
            {"response_format": with_schema(strict=None)},
            "response_format.json_schema.schema",
            JsonSchema(AS_TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            ANY_OBJECT,
        ),
        ({"guided_json": SCHEMA}, "guided_json", JsonSchema(AS_TEXT)),
        ({"guided_json": AS_TEXT}, "guided_json", JsonSchema(AS_TEXT)),
        ({"guided_regex": "a+"}, "guided_regex", Regex("a+")),
        ({"guided_choice": ["a", "b", "a"]}, "guided_choice", Choices(("a", "b"))),
        ({"guided_grammar": GBNF}, "guided_grammar", Gbnf(GBNF)),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", Lark('start: "a"')),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            "structured_outputs.json",
            JsonSchema(AS_TEXT),
        ),
        (
            {"structured_outputs": {"choice": ["é"]}},
            "structured_outputs.choice",
            Choices(("é",)),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            ANY_OBJECT,
        ),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            "guided_regex",
            Regex("a"),
        ),
    ],
)
def test_request_gets_the_grammar_it_asks_for(
    body: dict[str, object], field: str, source: object
) -> None:
    found = requested_grammar(body)

    assert found is not None
    assert (found.field, found.source) == (field, source)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json": None, "json_object": False}},
    ],
)
def test_request_gets_no_grammar_when_it_asks_for_none(body: dict[str, object]) -> None:
    assert requested_grammar(body) is None


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.more"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": with_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"response_format": with_schema(schema="{}")}, "response_format.json_schema.schema"),
        ({"response_format": with_schema(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": with_schema(name=5)}, "response_format.json_schema.name"),
        ({"response_format": with_schema(Schema={})}, "response_format.json_schema.Schema"),
        (
            {"response_format": with_schema(schema=nested(100_000))},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "guided_json"),
        ({"guided_json": {"const": "\ud800"}}, "guided_json"),
        ({"guided_json": {"const": float("nan")}}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": ""}, "guided_json"),
        ({"guided_regex": 7}, "guided_regex"),
        ({"guided_regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "abc"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice"),
        ({"guided_choice": ["x" * 40_000, "y" * 40_000]}, "guided_choice"),
        ({"guided_grammar": None, "guided_regex": {}}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ],
)
def test_grammar_request_is_refused_by_its_field(body: dict[str, object], field: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        requested_grammar(body)
    assert refused.value.field == field
