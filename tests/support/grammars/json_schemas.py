"""JSON schemas: by hand, one for each thing that schemas can say, and made at random."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:  # noqa: ANN401
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_STRING: Schema = {"type": "string", "maxLength": 8}
_INTEGER: Schema = {"type": "integer", "minimum": -99, "maximum": 999}
_POINT = _object(x={"type": "number"}, y={"type": "number"})
_TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": _object(
            value=_INTEGER,
            children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
        )
    },
}
_EXPRESSION: Schema = {
    "$ref": "#/$defs/expression",
    "$defs": {
        "expression": {
            "anyOf": [{"type": "integer"}, _STRING, {"$ref": "#/$defs/operation"}],
        },
        "operation": _object(
            operator={"enum": ["+", "-", "*"]},
            operands={
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {"$ref": "#/$defs/expression"},
            },
        ),
    },
}
_LIST: Schema = {
    "definitions": {
        "list": {
            "anyOf": [{"type": "null"}, _object(head=_STRING, tail={"$ref": "#/definitions/list"})]
        }
    },
    "$ref": "#/definitions/list",
}
_MUTUAL: Schema = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {
            "type": "object",
            "properties": {"b": {"$ref": "#/$defs/b"}},
            "additionalProperties": False,
        },
        "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
    },
}

ANY_VALUE: tuple[Schema, ...] = ({}, {"type": "object"}, {"type": "array"}, {"title": "anything"})

SCALARS: tuple[Schema, ...] = (
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": ["string", "null"]},
    {"type": ["integer", "boolean", "null"]},
    {"const": "exactly this"},
    {"const": 17},
    {"const": None},
    {"const": {"a": [1, {"b": "ß"}]}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, "three", None, True, [4], {"five": 5}]},
    {"enum": ["", " ", "\n", "\\", '"', "🦊", "é", "</s>"]},
    {"type": "string", "enum": ["a", "b", "ab"]},
)

NUMBERS: tuple[Schema, ...] = (
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": -1},
    {"type": "integer", "minimum": 5, "maximum": 5},
    {"type": "integer", "minimum": -17, "maximum": 123},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 100},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 1000000},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
)

STRINGS: tuple[Schema, ...] = (
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 4, "maxLength": 4},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-z]+$"},
    {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(yes|no|maybe)$"},
    {"type": "string", "pattern": "^\\d{4}-\\d{2}$"},
    {"type": "string", "pattern": "^[A-ZÄÖÜ][a-zäöüß]{1,6}$"},
    {"type": "string", "pattern": "^\\S+@\\S+\\.[a-z]{2,3}$", "maxLength": 30},
    {"type": "string", "pattern": "ab"},
    {"type": "string", "pattern": "^a"},
    {"type": "string", "pattern": "z$"},
    {"type": "string", "pattern": '^["\\\\/]{2}$'},
    {"type": "string", "pattern": "^(🦊|🐉){1,3}$"},
    *(
        {"type": "string", "format": name}
        for name in (
            "date-time",
            "time",
            "date",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
        )
    ),
)

ARRAYS: tuple[Schema, ...] = (
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": _STRING, "maxItems": 0},
    {"type": "array", "items": False},
    {"type": "array", "prefixItems": [_STRING, _INTEGER]},
    {"type": "array", "prefixItems": [_STRING, {"type": "boolean"}], "items": False},
    {"type": "array", "prefixItems": [_INTEGER], "items": _STRING, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": _INTEGER}}},
    {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 6},
    {"type": "array", "items": _POINT, "minItems": 1, "maxItems": 2},
)

OBJECTS: tuple[Schema, ...] = (
    _POINT,
    _object(name=_STRING, age=_INTEGER, tags={"type": "array", "items": _STRING, "maxItems": 3}),
    {"type": "object", "properties": {"a": _STRING, "b": _INTEGER}},
    {"type": "object", "properties": {"a": _STRING}, "required": ["a"]},
    {"type": "object", "properties": {"a": _STRING}, "additionalProperties": False},
    {"type": "object", "properties": {"a": _STRING}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "object", "additionalProperties": {"enum": [1]}, "minProperties": 1},
    {"type": "object", "additionalProperties": _INTEGER, "maxProperties": 2},
    {"type": "object", "required": ["q"]},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {
        "type": "object",
        "patternProperties": {"^n_[a-z]+$": _INTEGER},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "patternProperties": {"^n": _INTEGER, "^s": _STRING},
        "additionalProperties": False,
    },
    _object(
        **{"ключ": _STRING, "键": _INTEGER, "a b": {"type": "null"}, 'q"q': _INTEGER, "": _INTEGER}
    ),
    _object(**{f"property_{index}": _INTEGER for index in range(12)}),
    {
        "type": "object",
        "properties": {f"optional_{index}": {"type": "boolean"} for index in range(12)},
        "additionalProperties": False,
    },
    _object(a=_object(b=_object(c=_object(d=_object(e=_STRING))))),
    {"properties": {"a": _STRING}, "additionalProperties": False},
)

COMBINED: tuple[Schema, ...] = (
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"anyOf": [_POINT, _object(kind={"const": "none"})]},
    {"oneOf": [{"type": "string"}, {"type": "null"}]},
    {"oneOf": [_object(kind={"const": "a"}, a=_STRING), _object(kind={"const": "b"}, b=_INTEGER)]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 30}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": _STRING}, "required": ["a"]},
            {"type": "object", "properties": {"b": _INTEGER}, "required": ["b"]},
        ]
    },
    {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "pattern": "^[ab]*$"}]},
    {
        "allOf": [
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            {"maximum": 7, "maxLength": 2},
        ]
    },
    {"anyOf": [{"allOf": [{"type": "integer"}, {"minimum": 0}]}, {"const": "x"}], "title": "t"},
    {
        "type": "object",
        "properties": {"v": {"anyOf": [_INTEGER, {"type": "null"}]}},
        "required": ["v"],
    },
    {"$ref": "#/$defs/word", "$defs": {"word": {"type": "string", "pattern": "^[a-z]{2,5}$"}}},
    {"$ref": "#/$defs/n", "maximum": 9, "$defs": {"n": {"type": "integer", "minimum": 0}}},
    {"$id": "https://example.com/root", "$ref": "#/$defs/w", "$defs": {"w": _STRING}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer", "minimum": 1},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}},
)

RECURSIVE: tuple[Schema, ...] = (
    _TREE,
    _EXPRESSION,
    _LIST,
    _MUTUAL,
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
)

SUPPORTED = (
    *ANY_VALUE,
    *SCALARS,
    *NUMBERS,
    *STRINGS,
    *ARRAYS,
    *OBJECTS,
    *COMBINED,
    *RECURSIVE,
)

# What is not supported, and a word of what is said of it.
REFUSED: tuple[tuple[Schema | list[Any], str], ...] = (
    ({"not": {"type": "string"}}, "not"),
    ({"type": "object", "if": {}, "then": {}, "else": {}}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"type": "string", "format": "idn-email"}, "idn-email"),
    ({"type": "string", "format": "regex"}, "regex"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"$ref": "https://example.com/other.json"}, "example.com"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, "oneOf"),
    (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}, "c": {}},
            "minProperties": 2,
        },
        "Properties",
    ),
    ({"type": "strin"}, "strin"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "nsatisfiable"),
    ({"enum": []}, "anyOf"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ([], "object"),
)


def random_schema(generator: random.Random, depth: int = 3) -> Schema:
    """Draws a schema of the ones above, nested in objects, arrays and alternatives."""
    if depth == 0 or generator.random() < 0.3:
        return generator.choice((*SCALARS, *NUMBERS, *STRINGS))
    kind = generator.choice(("object", "array", "tuple", "anyOf", "recursive"))
    if kind == "object":
        names = generator.sample(("a", "b", "name", "größe", "x y", "$", "🦊", "very_long_name"), 3)
        properties = {name: random_schema(generator, depth - 1) for name in names}
        required = [name for name in names if generator.random() < 0.7]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        least = generator.randrange(3)
        return {
            "type": "array",
            "items": random_schema(generator, depth - 1),
            "minItems": least,
            "maxItems": least + generator.randrange(3),
        }
    if kind == "tuple":
        items = [random_schema(generator, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(generator, depth - 1) for _ in range(2)]}
    return generator.choice(ARRAYS + OBJECTS)
