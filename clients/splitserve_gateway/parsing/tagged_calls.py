"""The notation of Qwen3-Coder: a call as tags, its arguments as text between them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from splitserve_gateway.parsing.calls import ToolSchemas, read_name
from splitserve_gateway.parsing.json_reading import is_json
from splitserve_gateway.parsing.reader import NotAsExpected, Reader, Reading, Stops

_MAX_KEY_CHARS = 256
_MAX_VALUE_CHARS = 65_536  # a longer one is a string: it is decoded in one go
_END_OF_VALUE = Stops(("</parameter>",))
_END_OF_TAG = Stops((">", "\n", "<"))


def read_tagged_call(reader: Reader, tools: ToolSchemas) -> Reading[tuple[str, str]]:
    """Reads `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`: name and arguments.

    A value is text. It is taken for JSON if the parameter's schema says something else than a
    string and it can be read as that. Raises NotAsExpected.
    """
    yield from reader.expect("<function=")
    name = yield from read_name(reader)
    yield from reader.expect(">")
    properties = tools.get(name, {}).get("properties")
    arguments: dict[str, str] = {}
    while True:
        yield from reader.skip_space()
        tag = yield from reader.one_of(("<parameter=", "</function>"))
        if tag is None:
            raise NotAsExpected
        if tag == "</function>":
            break
        key = yield from _read_up_to(reader, _END_OF_TAG, ">")
        value = yield from _read_up_to(reader, _END_OF_VALUE, "</parameter>")
        if len(key) > _MAX_KEY_CHARS:
            raise NotAsExpected
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _value_text(value.removeprefix("\n").removesuffix("\n"), schema)
    members = (f"{json.dumps(key, ensure_ascii=False)}: {v}" for key, v in arguments.items())
    return name, "{" + ", ".join(members) + "}"


def _read_up_to(reader: Reader, stops: Stops, expected: str) -> Reading[str]:
    pieces: list[str] = []
    if (yield from reader.until(stops, pieces.append)) != expected:
        raise NotAsExpected
    return "".join(pieces)


def _value_text(text: str, schema: object) -> str:
    """What stands between the tags, as JSON."""
    types = _types(schema)
    is_text = "string" in types and not (text == "null" and "null" in types)
    if types and not is_text and len(text) <= _MAX_VALUE_CHARS and is_json(text):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> set[str]:
    """The JSON types that `schema` names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {each for each in (named if isinstance(named, list) else [named]) if each}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            types |= _types(option)
    return types or ({"object"} if "$ref" in schema else set())
