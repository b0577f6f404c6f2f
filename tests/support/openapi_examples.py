"""Requests that an OpenAPI page allows, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jsonschema

Json = dict[str, Any]


def offered_bodies(page: Json, path: str, body: Json, together: Mapping[str, Json]) -> list[Json]:
    """Returns `body` with each field of the path's schema, and each kind of its values.

    `together`: what else a request has when it has a field, which only words on the page tell.
    """
    content = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    components = {"components": page["components"]}
    validator = jsonschema.Draft202012Validator({**content["schema"], **components})
    examples = Examples(page)
    schema = page["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    known = schema["properties"]
    bodies = [
        offered
        for name, field in known.items()
        for value in examples.of(field)
        if validator.is_valid(
            offered := {
                **body,
                **{k: v for k, v in together.get(name, {}).items() if k in known},
                name: value,
            }
        )
    ]
    assert len(bodies) > 2 * len(known)
    return bodies


class Examples:
    """Values of a schema: its ends, each of its alternatives, each property alone."""

    def __init__(self, page: Json) -> None:
        self._schemas = page["components"]["schemas"]

    def of(self, schema: Json) -> Iterator[Any]:
        schema = self._resolved(schema)
        for key in ("anyOf", "oneOf"):
            if key in schema and "properties" not in schema:
                for each in schema[key]:
                    yield from self.of({**each, **{k: v for k, v in schema.items() if k != key}})
                return
        if "const" in schema or "enum" in schema:
            yield from schema.get("enum", [schema.get("const")])
            return
        kinds = schema.get("type", ["null", "boolean", "integer", "string", "array", "object"])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            yield from getattr(self, f"_{kind}")(schema)

    def _resolved(self, schema: Json) -> Json:
        if "$ref" not in schema:
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**self._schemas[schema["$ref"].rpartition("/")[2]], **rest}

    def _null(self, _: Json) -> Iterator[None]:
        yield None

    def _boolean(self, _: Json) -> Iterator[bool]:
        yield from (False, True)

    def _integer(self, schema: Json) -> Iterator[int]:
        low = schema.get("minimum", -(2**31))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
        if (low, high) == (0, 2**31 - 1):
            # A token's: which there are is a matter of the model.
            high = 300
        yield from (low, high, min(max(low, 1), high))

    def _number(self, schema: Json) -> Iterator[float]:
        low: float = schema.get("minimum", -1e6)
        low = schema.get("exclusiveMinimum", low)
        high: float = schema.get("maximum", 1e6)
        yield from (low + (0.001 if "exclusiveMinimum" in schema else 0), high, (low + high) / 2)

    def _string(self, schema: Json) -> Iterator[str]:
        yield from schema.get("examples", ["x" * schema.get("minLength", 0), "x"])

    def _array(self, schema: Json) -> Iterator[list[Any]]:
        if schema.get("minItems", 0) == 0:
            yield []
        for item in self.of(schema.get("items", {"type": "string"})):
            yield [item]

    def _object(self, schema: Json) -> Iterator[Json]:
        properties = schema.get("properties", {})
        needed = schema.get("required", [])
        least = {name: next(self._used(properties[name])) for name in needed}
        yield least
        for name in properties:
            for value in islice(self.of(properties[name]), 3):
                yield {**least, name: value}

    def _used(self, schema: Json) -> Iterator[Any]:
        """Not null."""
        return (value for value in self.of(schema) if value is not None)
