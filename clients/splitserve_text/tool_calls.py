"""Readers of tool calls: JSON objects, Qwen3-Coder's tags, and the JSON values within."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitserve_common import parse_json
from splitserve_text.answer_reader import AnswerWriter, NotAsExpected, Reader, Reading, Stops

# Schemas of the tools' parameters by the tools' names.
ToolSchemas = Mapping[str, Mapping[str, Any]]

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = ("name", *_ARGUMENTS, "type", "id")  # the only keys of a call without a mark before it
_MAX_QUOTED_CHARS = 65_536  # bound on arguments written as a string, which are decoded in one step
_MAX_NAME_CHARS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[^\s<>{}\[\]]*")


@dataclass(slots=True)
class CallReader:
    """Reads tool calls; writes each call once it is complete and valid.

    `barred`: names of tools that may not be called. `streams_arguments`: arguments are written as
    they arrive if the name came before them. `unwritten`: text read since the last written call; it
    becomes content if it turns out not to be a call.
    """

    reader: Reader
    writer: AnswerWriter
    tools: ToolSchemas
    barred: frozenset[str]
    streams_arguments: bool
    unwritten: list[str]

    def read_object(self, *, is_marked: bool, then: Callable[[], Reading[None]]) -> Reading[None]:
        """Reads and writes a call `{"name": ..., "arguments": {...}}`. Raises NotAsExpected.

        Without a mark before it (`is_marked`), the object is a call only if the tool is known and
        the call has arguments. `then` reads the text that has to follow.
        """
        call = _Call()
        yield from self.reader.expect("{")
        char = ","
        while char == ",":
            yield from self.reader.skip_space()
            yield from self._read_member(call, is_marked)
            yield from self.reader.skip_space()
            char = yield from self.reader.peek()
            if char in (",", "}"):
                self.reader.skip(1)
        if char != "}" or not self._is_call(call, is_marked):
            raise NotAsExpected
        yield from then()
        self._write(call)

    def write(self, name: str, arguments: str) -> None:
        """Writes a complete call. Raises NotAsExpected if the tool is barred."""
        self._check_name(name)
        self._write(_Call(name, arguments))

    def read_arguments_of(self, name: str) -> Reading[None]:
        """Reads and writes the arguments of a call with a known name. Raises NotAsExpected."""
        self._check_name(name)
        call = _Call(name)
        yield from self._read_arguments(call)
        self._write(call)

    def _check_name(self, name: str, *, is_marked: bool = True) -> None:
        if name in self.barred or not (is_marked or name in self.tools):
            raise NotAsExpected

    def _write(self, call: _Call) -> None:
        if not call.has_started:
            self.writer.start_call(call.name or "")
            self.writer.call_arguments(call.arguments or "{}")
        self.reader.flush()
        self.unwritten.clear()

    def _is_call(self, call: _Call, is_marked: bool) -> bool:
        if not call.name or len(call.name) > _MAX_NAME_CHARS or not _is_unicode(call.name):
            return False
        return is_marked or (call.name in self.tools and call.arguments is not None)

    def _read_member(self, call: _Call, is_marked: bool) -> Reading[None]:
        key = yield from read_string(self.reader)
        if not (is_marked or key in _BARE_KEYS):
            raise NotAsExpected
        yield from self.reader.skip_space()
        yield from self.reader.expect(":")
        yield from self.reader.skip_space()
        if key == "name" and call.name is None:
            call.name = yield from read_string(self.reader)
            self._check_name(call.name, is_marked=is_marked)
        elif key in _ARGUMENTS and call.arguments is None:
            yield from self._read_arguments(call)
        elif key == "name" or key in _ARGUMENTS:
            raise NotAsExpected  # repeated key
        else:
            yield from read_value(self.reader)

    def _read_arguments(self, call: _Call) -> Reading[None]:
        pieces: list[str] = []

        def write_on(piece: str) -> None:
            self.writer.call_arguments(piece)
            self.unwritten.clear()

        char = yield from self.reader.peek()
        if char == "{" and call.name and self.streams_arguments:
            call.has_started = True
            self.writer.start_call(call.name)
            with self.reader.recording(write_on):
                yield from read_value(self.reader)
            call.arguments = ""
            return
        with self.reader.recording(pieces.append):
            yield from read_value(self.reader)
        call.arguments = _object_text("".join(pieces))


@dataclass(slots=True)
class _Call:
    name: str | None = None
    arguments: str | None = None
    has_started: bool = False


def _object_text(value: str) -> str:
    """Returns the JSON object in `value`, also if quoted as a string; {} for null.

    Raises NotAsExpected for other values.
    """
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    if not value.startswith('"') or len(value) > _MAX_QUOTED_CHARS:
        raise NotAsExpected
    text = str(parse_json(value))
    if not (text.lstrip().startswith("{") and _is_unicode(text) and is_json(text)):
        raise NotAsExpected
    return text


def _is_unicode(text: str) -> bool:
    """Returns whether `text`, decoded from JSON escapes, has no lone surrogate."""
    return text.isascii() or not _SURROGATE.search(text)


def read_name(reader: Reader) -> Reading[str]:
    """Reads a bare tool name. Raises NotAsExpected if the name is empty or too long."""
    name = yield from reader.take(_NAME)
    if not name or len(name) > _MAX_NAME_CHARS:
        raise NotAsExpected
    return name


# -- Incremental JSON ------------------------------------------------------------------------------
# Values are checked strictly (RFC 8259), character by character, without building them.

MAX_DEPTH = 128  # nesting of arrays and objects
_MAX_SCALAR_CHARS = 1024  # longest number

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


def read_value(reader: Reader) -> Reading[None]:
    """Reads one JSON value. Raises NotAsExpected if it is invalid or nested too deeply."""
    closers: list[str] = []
    while True:
        opened = yield from _open_or_scalar(reader, closers)
        if opened:
            continue
        while closers:  # a value has ended
            yield from reader.skip_space()
            char = yield from reader.peek()
            if char == ",":
                reader.skip(1)
                yield from reader.skip_space()
                if closers[-1] == "}":
                    yield from _read_key(reader)
                break
            if char != closers[-1]:
                raise NotAsExpected
            reader.skip(1)
            closers.pop()
        if not closers:
            return


def is_json(text: str) -> bool:
    """Returns whether `text` is one JSON value with optional white space around."""
    reader = Reader()
    reader.feed(text.strip(" \t\r\n"))
    reader.end()
    try:
        for _ in read_value(reader):
            raise AssertionError("the text is complete")
    except NotAsExpected:
        return False
    return reader.is_at_end


def read_string(reader: Reader) -> Reading[str]:
    """Reads a JSON string and returns its content."""
    pieces: list[str] = []
    with reader.recording(pieces.append):
        yield from _skip_string(reader)
    return str(parse_json("".join(pieces)))


def _open_or_scalar(reader: Reader, closers: list[str]) -> Reading[bool]:
    """Reads a scalar, or opens an object or array.

    Returns True if a value has to follow inside the opened container, False if a value has ended.
    """
    char = yield from reader.peek()
    if char == '"':
        yield from _skip_string(reader)
        return False
    if char not in ("{", "["):
        yield from _skip_scalar(reader)
        return False
    if len(closers) == MAX_DEPTH:
        raise NotAsExpected
    reader.skip(1)
    closer = "}" if char == "{" else "]"
    yield from reader.skip_space()
    if (yield from reader.peek()) == closer:
        reader.skip(1)
        return False
    closers.append(closer)
    if char == "{":
        yield from _read_key(reader)
    return True


def _read_key(reader: Reader) -> Reading[None]:
    yield from _skip_string(reader)
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()


def _skip_string(reader: Reader) -> Reading[None]:
    yield from reader.expect('"')
    while True:
        yield from reader.take(_PLAIN)
        char = yield from reader.peek()
        if char == '"':
            reader.skip(1)
            return
        if char != "\\":
            raise NotAsExpected
        length = 6 if (yield from reader.peek(2)) == "\\u" else 2
        if not _ESCAPE.fullmatch((yield from reader.peek(length))):
            raise NotAsExpected
        reader.skip(length)


def _skip_scalar(reader: Reader) -> Reading[None]:
    text = yield from reader.take(_SCALAR_CHARS)
    if len(text) > _MAX_SCALAR_CHARS or not _SCALAR.fullmatch(text):
        raise NotAsExpected


# -- Calls as tags (Qwen3-Coder) -------------------------------------------------------------------

_MAX_KEY_CHARS = 256
_MAX_VALUE_CHARS = 65_536  # longer values are strings: checking for JSON takes one step
_END_OF_VALUE = Stops(("</parameter>",))
_END_OF_TAG = Stops((">", "\n", "<"))


def read_tagged_call(reader: Reader, tools: ToolSchemas) -> Reading[tuple[str, str]]:
    """Reads a tagged call; returns its name and its arguments as a JSON object.

    Form: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`. A value is text. It
    counts as JSON if the parameter's schema has types other than string and the value parses.
    Raises NotAsExpected.
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
    """Returns the text between parameter tags as JSON."""
    types = _types(schema)
    is_text = "string" in types and not (text == "null" and "null" in types)
    if types and not is_text and len(text) <= _MAX_VALUE_CHARS and is_json(text):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> set[str]:
    """Returns the JSON types that `schema` names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {each for each in (named if isinstance(named, list) else [named]) if each}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            types |= _types(option)
    return types or ({"object"} if "$ref" in schema else set())
