"""JSON Schemas of the fields that `grammars.requested` reads, for the OpenAPI description."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_NULL: Json = {"type": "null"}
_TEXT: Json = {"type": "string", "minLength": 1}


def _closed(properties: Json, *required: str) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


_PLAIN_FORMAT = _closed({"type": {"enum": ["text", "json_object"]}}, "type")
_JSON_SCHEMA: Json = {
    "name": {"type": ["string", "null"]},
    "description": {"type": ["string", "null"]},
    "schema": {"type": ["object", "null"]},
    "strict": {"type": ["boolean", "null"]},
}
_KIND: Json = {"const": "json_schema"}

RESPONSE_FORMAT: Json = {
    "anyOf": [
        _PLAIN_FORMAT,
        _closed({"type": _KIND, "json_schema": _closed(_JSON_SCHEMA)}, "type", "json_schema"),
        _NULL,
    ]
}
TEXT_FORMAT: Json = {
    "anyOf": [_PLAIN_FORMAT, _closed({"type": _KIND, **_JSON_SCHEMA}, "type"), _NULL]
}
GUIDED: dict[str, Json] = {
    "json": _or_null({"type": "object"}),
    "regex": _or_null({**_TEXT, "description": "A regular expression."}),
    "choice": _or_null({"type": "array", "minItems": 1, "maxItems": 1024, "items": _TEXT}),
    "grammar": _or_null(
        {**_TEXT, "description": "In Lark or GBNF.", "examples": ['start: "yes" | "no"']}
    ),
}
STRUCTURED_OUTPUTS: Json = _or_null(
    {**_closed({**GUIDED, "json_object": {"type": ["boolean", "null"]}}), "maxProperties": 1}
)
