"""JSON Schemas in the form that the compiler of grammars takes.

The compiler refuses keywords that it does not know. Those that restrict nothing are dropped, and
some others are written in its own terms, so that the schema has the same meaning. A schema that it
refuses nevertheless can be loosened: then the keywords at fault are dropped and named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Json = Mapping[str, object]

# Formats that the compiler enforces. Any other is an annotation (JSON Schema 2020-12, 7.2.1).
ENFORCED_FORMATS = frozenset(
    {
        "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
# Keywords that restrict a value and that the compiler refuses.
NOT_COMPILED = frozenset(
    {
        "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
        "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems",
        "propertyNames", "unevaluatedProperties", "$dynamicRef",
    }
)  # fmt: skip
# All keywords that restrict a value, besides formats that are annotations.
KEYWORDS = NOT_COMPILED | {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required",
    "additionalProperties", "patternProperties", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern",
    "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_SIZES = ("minProperties", "maxProperties")
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not",
            "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_MAX_NAME_CHARS = 80

Change = Callable[[dict[str, object], str], dict[str, object]]


def compilable(schema: Json) -> Json:
    """Returns an equivalent of `schema` with fewer keywords that the compiler refuses.

    Raises RecursionError for a schema that is nested too deeply.
    """
    return changed(schema, "", lambda each, _: _simplified(each))


@dataclass(frozen=True, slots=True)
class LooserSchema:
    """Schema that every instance of another one matches. `ignored`: paths of dropped keywords."""

    schema: Json
    ignored: tuple[str, ...]


def looser(schema: Json) -> Iterator[LooserSchema]:
    """Yields looser forms of a `compilable` schema, the strictest first; none if nothing is loose.

    The second also takes alternatives of `oneOf` that do not exclude each other.
    """
    for drops in (_without_refused, _without_one_of):
        ignored: list[str] = []

        def change(
            each: dict[str, object],
            path: str,
            drops: Callable[[dict[str, object]], dict[str, object]] = drops,
            ignored: list[str] = ignored,
        ) -> dict[str, object]:
            left = drops(each)
            ignored += [path + key for key in each if key not in left]
            return left

        made = changed(schema, "", change)
        if ignored:
            yield LooserSchema(made, tuple(ignored))


def changed(schema: Json, path: str, change: Change) -> dict[str, object]:
    """Returns `schema` with `change` applied to it and then to the schemas within it.

    `path`: of the schema, empty or with a dot at its end.
    """
    made = change(dict(schema), path)
    for key, value in made.items():
        inside = f"{path}{key}."
        if key in _SCHEMAS and isinstance(value, dict):
            made[key] = changed(value, inside, change)
        elif key in _LISTS and isinstance(value, list):
            made[key] = [
                changed(each, f"{inside}{index}.", change) if isinstance(each, dict) else each
                for index, each in enumerate(value)
            ]
        elif key in _OBJECTS and isinstance(value, dict):
            made[key] = {
                name: changed(each, f"{inside}{_named(name)}.", change)
                if isinstance(each, dict)
                else each
                for name, each in value.items()
            }
    return made


def _named(name: str) -> str:
    """Returns a caller's name as printable ASCII."""
    return ascii(name[:_MAX_NAME_CHARS])[1:-1]


# -- Keywords of one schema ------------------------------------------------------------------------

# Values with which a keyword restricts nothing.
_IDLE: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}


def _simplified(schema: dict[str, object]) -> dict[str, object]:
    made = {key: value for key, value in schema.items() if not _is_idle(key, value, schema)}
    if isinstance(pattern := made.get("pattern"), str):
        made |= _without_look_ahead(pattern, made.get("allOf"))
    if {"propertyNames", "properties", "patternProperties"} & made.keys() == {"propertyNames"}:
        made = _named_properties(made)
    return made


def _is_idle(key: str, value: object, schema: Json) -> bool:
    """Returns whether a keyword restricts nothing."""
    if key == "format":
        return value not in ENFORCED_FORMATS if isinstance(value, str) else False
    if key in ("then", "else"):
        return "if" not in schema
    if key == "if":
        return not schema.keys() & {"then", "else"}
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    # `True == 1`, and 1 is no schema.
    return any(value == idle and type(value) is type(idle) for idle in _IDLE.get(key, ()))


def _named_properties(schema: dict[str, object]) -> dict[str, object]:
    """Writes `propertyNames` of a schema without properties as properties or their pattern."""
    names, values = schema["propertyNames"], schema.get("additionalProperties", True)
    if not isinstance(names, dict) or names.keys() - {"type", "enum", "pattern", "title"}:
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    rest["additionalProperties"] = False
    match names:
        case {"pattern": str(pattern), **more} if "enum" not in more:
            return {**rest, "patternProperties": {pattern: values}}
        case {"enum": [*allowed], **more} if "pattern" not in more:
            if all(isinstance(name, str) for name in allowed):
                return {**rest, "properties": dict.fromkeys(allowed, values)}
    return schema


def _without_refused(schema: dict[str, object]) -> dict[str, object]:
    properties, required = schema.get("properties"), schema.get("required")
    needed = set(map(str, required)) if isinstance(required, list) else set()
    has_optional = isinstance(properties, dict) and bool(properties.keys() - needed)
    return {
        key: value
        for key, value in schema.items()
        if key not in NOT_COMPILED
        and not (key == "pattern" and _REFUSED_PATTERN.search(str(value)))
        and not (key in _SIZES and has_optional)
    }


def _without_one_of(schema: dict[str, object]) -> dict[str, object]:
    made = _without_refused(schema)
    alternatives = made.pop("oneOf", None)
    if isinstance(alternatives, list):
        both = made.get("allOf")
        made["allOf"] = [*(both if isinstance(both, list) else ()), {"anyOf": alternatives}]
    return made


# -- Look-ahead, which the compiler's regular expressions do not have ------------------------------

# Look-around, and references to groups.
_REFUSED_PATTERN = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k|\(\?P=|\\[bB]")
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|[()|]", re.DOTALL)
# A text of some characters alone, up to its end: `(?!^[-+.]*$)`.
_ONLY_THESE = re.compile(r"\^?\[(\^?)((?:\\.|[^\]\\])+)\]\*\$")


# Number of digits and a point, before digits that have no more: in patterns for decimal numbers.
_DIGITS = re.compile(
    r"\(\?=\[\\d\.\]\{1,(\d{1,4})\}0\*\$\)(?=\\d\{0,(\d{1,4})\}\\\.\\d\{0,(\d{1,4})\}0\*\$)"
)


def _has_few_digits(found: re.Match[str]) -> bool:
    return int(found[1]) > int(found[2]) + int(found[3])


def _without_look_ahead(pattern: str, both: object) -> dict[str, object]:
    """Returns keywords with the meaning of `pattern`: its look-ahead at the beginning is split off.

    A text matches `^(?=A)B` if and only if it matches `^A` and `^B`. `both`: the schema's `allOf`.
    """
    ahead: list[str] = []
    rest = _DIGITS.sub(lambda found: "" if _has_few_digits(found) else found[0], pattern)
    while (found := re.match(r"\^\(\?([=!])", rest)) is not None:
        end = _end_of_group(rest, 1)
        if end is None:
            return {}
        inner = rest[found.end() : end - 1]
        if found[1] == "!":
            only = _ONLY_THESE.fullmatch(inner)
            if only is None:
                return {}
            # Not only these characters: somewhere is another one.
            inner = rf"[\s\S]*[{'' if only[1] else '^'}{only[2]}]"
        ahead.append(f"^(?:{inner.removeprefix('^')})")
        rest = f"^{rest[end:]}"
    if (
        rest == pattern
        or has_alternatives(rest)
        or any(map(_REFUSED_PATTERN.search, [*ahead, rest]))
    ):
        return {}
    if not ahead:
        return {"pattern": rest}
    others = both if isinstance(both, list) else []
    return {"pattern": rest, "allOf": [*others, *({"pattern": each} for each in ahead)]}


def is_refused_pattern(pattern: str) -> bool:
    """Returns whether `pattern` has look-around, or references to groups."""
    return _REFUSED_PATTERN.search(pattern) is not None


def _end_of_group(pattern: str, start: int) -> int | None:
    """Returns the position after the group that begins at `start`; None if it has no end."""
    depth = 0
    for part in _PART.finditer(pattern, start):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
    return None


def has_alternatives(pattern: str) -> bool:
    """Returns whether `pattern` has alternatives outside of groups."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if part[0] == "|" and depth == 0:
            return True
    return False
