"""Schemas in the compiler's terms mean the same; looser ones take all that the original takes."""

from __future__ import annotations

import json
import random
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from jsonschema import Draft202012Validator
from openai.lib._parsing._completions import type_to_response_format_param
from pydantic import BaseModel, Field, SecretStr, conlist

from splitserve_gateway.grammars import (
    ENFORCED_FORMATS,
    NOT_COMPILED,
    CheckerLimits,
    GrammarChecker,
    GrammarRefused,
    RequestedGrammar,
    compilable,
    looser,
    requested_grammar,
)
from splitserve_text import JsonSchema
from tests.unit.gateway.grammars.byte_model import accepts, drawn

Json = dict[str, Any]
# Of JSON Schema 2020-12, 7.3, and of pydantic.
FORMATS = [
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex", "password", "binary", "base64url", "path",
    "file-path", "directory-path", "json-string", "multi-host-uri", "ipv4network", "ipvanyaddress",
    "phone", "color", "int32", "double", "frob",
]  # fmt: skip
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
MONEY = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"
TEXTS = [
    "",
    "a",
    "A1",
    "aA1",
    "aaaaaaaa",
    "Abcdefg1",
    "12",
    "-",
    "-.",
    "+1.5",
    ".5",
    "1.2.3",
    "p w",
]
ARRAYS = [[], [1], ["a"], ["a", 1], ["a", "a"], [1, 1, "a"]]
OBJECTS = [{}, {"a": 1}, {"b": 1}, {"ab": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"c": 1}, {"b": None}]
VALUES: list[Any] = [*TEXTS, *ARRAYS, *OBJECTS, 1, 1.5, True, None]
NUMBER = {"type": "integer"}
LETTERS = {"enum": ["a", "b"]}
# Schemas with keywords that the compiler refuses as they stand.
SIMPLIFIED: list[Json] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    {"type": "array", "minContains": 1, "maxContains": 0},
    {"type": "object", "propertyNames": {"type": "string"}, "unevaluatedProperties": True},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": NUMBER},
    {"type": "object", "propertyNames": LETTERS, "additionalProperties": NUMBER},
    {"type": "object", "propertyNames": {**LETTERS, "type": "string", "title": "L"}},
    {"type": "object", "dependentRequired": {}, "dependentSchemas": {}},
    {"type": "string", "if": {"minLength": 3}},
    {"type": "string", "then": {"minLength": 3}, "else": False},
    {"type": "string", "pattern": DECIMAL},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
    {"type": "string", "pattern": MONEY},
    {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,}$"},
    {"type": "string", "pattern": r"^(?=a|A)(a|A1)+$", "allOf": [{"maxLength": 3}]},
    {"type": "object", "properties": {"a": {"type": "string", "format": "password"}}},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "format": "path"}}},
    # Names of properties, and values, are no keywords.
    {"type": "object", "properties": {"format": {"type": "integer"}, "not": {"const": {"not": 1}}}},
]  # fmt: skip
LOOSENED: list[tuple[Json, list[str]]] = [
    ({"type": "object", "not": {"required": ["a"]}}, ["not"]),
    ({"type": "string", "if": {"minLength": 3}, "then": {"pattern": "^a"}, "else": {"const": ""}},
     ["if", "then", "else"]),
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
    ({"type": "array", "contains": {"type": "string"}, "minContains": 2, "maxContains": 3},
     ["contains", "minContains", "maxContains"]),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ["propertyNames"]),
    ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
     ["dependentRequired"]),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ["dependentSchemas"]),
    ({"type": "object", "dependencies": {"a": ["b"]}}, ["dependencies"]),
    ({"type": "object", "unevaluatedProperties": False}, ["unevaluatedProperties"]),
    ({"type": "array", "unevaluatedItems": False}, ["unevaluatedItems"]),
    ({"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a"}}}, ["$dynamicRef"]),
    ({"type": "string", "pattern": r"^(?!aa)a*$"}, ["pattern"]),
    ({"type": "string", "pattern": r"^a(?=A)|1"}, ["pattern"]),
    ({"type": "string", "pattern": r"^(.)\1*$"}, ["pattern"]),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, ["minProperties"]),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True},
                                       "é\n": {"items": [{"not": {}}], "type": "array"}}},
     ["properties.a.uniqueItems", r"properties.\xe9\n.items.0.not"]),
]  # fmt: skip


def takes(schema: Json, value: object) -> bool:
    """Whether grammars of `schema` take `value`."""
    return accepts(JsonSchema(json.dumps(schema)), json.dumps(value))


def is_valid(schema: Json, value: object) -> bool:
    """Whether `value` matches `schema`, by another implementation. Raises nothing."""
    return bool(Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("text_format", FORMATS)
def test_format_restricts_texts_when_the_compiler_knows_it(text_format: str) -> None:
    made = compilable({"type": "string", "format": text_format})
    assert takes(dict(made), "\\ no such thing") == (text_format not in ENFORCED_FORMATS)


@pytest.mark.parametrize("schema", SIMPLIFIED)
def test_schema_means_the_same_when_simplified(schema: Json) -> None:
    made = dict(compilable(schema))
    assert list(looser(made)) == []
    for value in VALUES:
        assert takes(made, value) == is_valid(schema, value), value


@pytest.mark.parametrize(("schema", "ignored"), LOOSENED)
def test_schema_takes_more_when_loosened(schema: Json, ignored: list[str]) -> None:
    first, *_ = looser(compilable(schema))
    assert list(first.ignored) == ignored
    for value in VALUES:
        if "$dynamicRef" not in schema and is_valid(schema, value):
            assert takes(dict(first.schema), value), value


def test_every_keyword_that_is_not_compiled_is_tried() -> None:
    tried = {path.split(".")[-1] for _, ignored in LOOSENED for path in ignored}
    assert tried >= NOT_COMPILED


def test_alternatives_may_overlap_when_loosened() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}, {"type": "null"}]}
    (form,) = looser(compilable(schema))
    assert form.ignored == ("oneOf",)
    assert takes(dict(form.schema), "abcd")
    assert takes(dict(form.schema), None)
    assert not takes(dict(form.schema), 1)


@pytest.mark.parametrize(
    "pattern",
    ["^(?=" + "(" * 30_000, "^(?=" + "[" * 60_000, "^(?=a)" * 10_000, "^(?!^[" + "\\" * 60_000],
)
def test_pattern_is_left_as_it_is_when_hostile(pattern: str) -> None:
    assert compilable({"pattern": pattern})["pattern"] in (pattern, "^")


# -- Requests --------------------------------------------------------------------------------------


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list[Cat] | None = None


class Order(BaseModel):
    secret: SecretStr
    raw: bytes
    path: Path
    price: Decimal
    numbers: conlist(int, min_length=1, max_length=3)  # type: ignore[valid-type]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    choice: Literal["a", "b"] | Literal[1]
    at: datetime
    day: date
    hour: time
    span: timedelta
    number: UUID
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")]
    pair: tuple[int, str]
    color: Color
    counts: dict[str, int]
    note: str | None


KNOWN = {
    "price": "1.5",
    "at": "2026-11-27T01:02:03Z",
    "day": "2026-11-27",
    "hour": "01:02:03",
    "span": "PT1H",
}


class Tags(BaseModel):
    tags: set[Literal["a", "b"]]


def asked(model: type[BaseModel]) -> Json:
    """The fields of a request for `model` as OpenAI's client sends them."""
    made: Any = type_to_response_format_param(model)
    return {"response_format": json.loads(json.dumps(made))}


def requested(body: Json) -> RequestedGrammar:
    found = requested_grammar(body)
    assert found is not None
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_are_of_the_model_when_it_is_asked_for(checker: GrammarChecker) -> None:
    body = asked(Order)
    assert body["response_format"]["json_schema"]["strict"]
    found = await checker.of("").check_requested(requested(body))
    assert found.ignored == ()
    rng = random.Random(0)
    answers = [text for _ in range(12) if (text := drawn(found.grammar, rng)) is not None]
    assert answers
    for answer in answers:
        values = json.loads(answer)
        assert values.keys() == Order.model_fields.keys()
        # A random text may be no decimal, and name a day that the calendar does not have.
        Order.model_validate(values | KNOWN)


@pytest.mark.asyncio(loop_scope="module")
async def test_set_is_refused_by_name_when_strict_and_named_otherwise(
    checker: GrammarChecker,
) -> None:
    body = asked(Tags)
    with pytest.raises(GrammarRefused, match="uniqueItems") as refused:
        await checker.of("").check_requested(requested(body))
    assert refused.value.field == "response_format.json_schema.schema"

    for strict in (False, None):
        body["response_format"]["json_schema"]["strict"] = strict
        found = await checker.of("").check_requested(requested(body))
        field = "response_format.json_schema.schema"
        assert found.ignored == (f"{field}.properties.tags.uniqueItems",)
        assert accepts(found.grammar, '{"tags": ["a", "a"]}')
        assert not accepts(found.grammar, '{"tags": ["c"]}')


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "schema", [{"$ref": "https://example.com/other"}, {"type": "string", "pattern": "("}]
)
async def test_schema_is_refused_when_no_looser_form_compiles(
    checker: GrammarChecker, schema: Json
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(GrammarRefused) as refused:
        await checker.of("").check_requested(requested({"response_format": form}))
    assert refused.value.field == "response_format.json_schema.schema"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("kind", "is_object"), [("object", True), (["object", "null"], False)])
async def test_schema_is_left_to_the_check_when_it_takes_too_long(
    kind: object, is_object: bool
) -> None:
    slow = {"type": "integer", "multipleOf": 9999991}
    schema = {"type": kind, "properties": {"n": slow}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    checker = GrammarChecker(CheckerLimits(first_cpu_s=0.1, max_cpu_s=0.1))
    found = await checker.of("").check_requested(requested({"response_format": form}))
    form["json_schema"]["strict"] = True  # type: ignore[index]
    with pytest.raises(GrammarRefused, match="processor time"):
        await checker.of("").check_requested(requested({"response_format": form}))
    await checker.close()

    assert found.ignored == ("response_format.json_schema.schema",)
    assert found.unenforced is not None
    assert json.loads(found.unenforced) == schema
    assert accepts(found.grammar, '{"n": 1}')
    assert accepts(found.grammar, "null") is not is_object


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
@pytest.mark.parametrize("as_text", [True, False])
async def test_guided_schema_is_simplified_but_never_loosened(
    checker: GrammarChecker, field: str, as_text: bool
) -> None:
    def body(schema: Json) -> Json:
        value = json.dumps(schema) if as_text else schema
        return {field: {"json": value} if field == "structured_outputs" else value}

    simple = requested(body({"type": "string", "format": "password"}))
    assert (await checker.of("").check_requested(simple)).ignored == ()
    with pytest.raises(GrammarRefused, match="not"):
        await checker.of("").check_requested(requested(body({"not": {"type": "string"}})))
