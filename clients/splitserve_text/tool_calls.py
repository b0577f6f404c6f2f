"""Writer of one tool call after the other, and the bodies that calls have in models' answers.

A call is written from its name on while it is read: `arguments` are a JSON object, as the model
wrote it if its notation is JSON, otherwise rewritten as JSON value by value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from splitserve_common import parse_json
from splitserve_text.answer_reader import AnswerWriter, NotAsExpected, Reader, Reading
from splitserve_text.json_reader import is_json, read_string, read_value
from splitserve_text.literals import PYTHON, Dialect, escaped, read_literal, read_object

# Schemas of the tools' parameters by the tools' names.
ToolSchemas = Mapping[str, Mapping[str, Any]]

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
# The only keys of a call without a mark before it.
_BARE_KEYS = (*_NAMES, *_ARGUMENTS, "function", "type", "id", "tool_call_id")
_MAX_QUOTED_CHARS = 65_536  # bound on arguments written as a string, which are decoded in one step
_MAX_NAME_CHARS = 256
MAX_KEY_CHARS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[^\s<>{}\[\]()]*")
_CALL_ID = re.compile(r"[0-9A-Za-z_-]*")
_IDENTIFIER = re.compile(r"\w*")


@dataclass(slots=True)
class CallReader:
    """Reads tool calls and writes them as they are read.

    `barred`: names of tools that may not be called. `unwritten`: text read since something was
    written; it becomes content if it turns out not to be a call. `opener`: the marker before the
    next call. `is_marked`: a marker announces calls here; without one only calls of known tools
    count. `is_open`: a call has begun and its arguments are not complete; `is_closing`: they are
    complete, and notation follows. `is_verbatim`: the arguments of the open call are text of the
    answer.
    """

    reader: Reader
    writer: AnswerWriter
    tools: ToolSchemas
    barred: frozenset[str]
    unwritten: list[str]
    opener: str = ""
    is_marked: bool = True
    is_open: bool = False
    is_closing: bool = False
    is_verbatim: bool = False

    def begin(self, text: str, opener: str, *, is_marked: bool) -> None:
        """Begins to look for calls after `text`, which was read and becomes content without one."""
        self.unwritten[:] = [text] if text else []
        self.opener, self.is_marked = opener, is_marked
        self.is_open = self.is_closing = False

    def check_name(self, name: str) -> None:
        """Raises NotAsExpected unless a tool `name` may be called here."""
        if not name or len(name) > _MAX_NAME_CHARS or not _is_unicode(name):
            raise NotAsExpected
        if name in self.barred or not (self.is_marked or name in self.tools):
            raise NotAsExpected

    def start(self, name: str, call_id: str | None = None) -> None:
        """Starts a call. Raises NotAsExpected."""
        self.check_name(name)
        self.writer.start_call(name, call_id)
        self.is_open, self.is_verbatim = True, False
        self._settle()

    def arguments(self, piece: str) -> None:
        """Writes a piece of the arguments."""
        self.writer.call_arguments(piece)
        self._settle()

    def end(self) -> None:
        """Ends the arguments of the started call."""
        self.is_open, self.is_closing = False, True
        self._settle()

    def write(self, name: str, arguments: str) -> None:
        """Writes a complete call. Raises NotAsExpected."""
        self.start(name)
        self.arguments(arguments)
        self.end()

    def read_arguments(self, name: str, call_id: str | None = None) -> Reading[None]:
        """Reads and writes a JSON object as the arguments of a call. Raises NotAsExpected."""
        if (yield from self.reader.peek()) != "{":
            raise NotAsExpected
        self.start(name, call_id)
        self.is_verbatim = True
        with self.reader.recording(self.arguments):
            yield from read_value(self.reader)
        self.end()

    def cut(self) -> str:
        """Ends a call that is malformed or cut; returns the text that was read and is no call.

        Where the text ends, what was left of the call belongs to it.
        """
        unwritten = "".join(self.unwritten)
        if self.reader.has_met_end and (self.is_open or self.is_closing):
            rest = self.reader.rest()
            if self.is_open and self.is_verbatim and rest:
                self.writer.call_arguments(rest)
            unwritten = ""
        self.is_open = self.is_closing = False
        return unwritten

    def _settle(self) -> None:
        self.reader.flush()
        self.unwritten.clear()


class CallBody(Protocol):
    """Notation of one call between the markers around it.

    `lists`: several calls may stand in brackets with commas between them.
    """

    @property
    def lists(self) -> bool:
        """Whether calls may stand in brackets."""

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""


def _is_unicode(text: str) -> bool:
    """Returns whether `text`, decoded from JSON escapes, has no lone surrogate."""
    return text.isascii() or not _SURROGATE.search(text)


def read_name(reader: Reader) -> Reading[str]:
    """Reads a bare tool name. Raises NotAsExpected if the name is empty or too long."""
    name = yield from reader.take(_NAME)
    if not name or len(name) > _MAX_NAME_CHARS:
        raise NotAsExpected
    return name


# -- JSON objects ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JsonBody:
    """Object with a name and arguments: `{"name": "add", "arguments": {"a": 1}}`.

    They may stand in an object `function` within, as in OpenAI's API.
    """

    lists: bool = True

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Without a mark it needs arguments. Raises NotAsExpected."""
        call = _Call()
        yield from _read_members(calls, call)
        if call.name is None:
            raise NotAsExpected
        if call.has_started:
            calls.end()
        elif call.arguments is None and not calls.is_marked:
            raise NotAsExpected
        else:
            calls.write(call.name, call.arguments or "{}")


@dataclass(slots=True)
class _Call:
    name: str | None = None
    arguments: str | None = None
    has_started: bool = False
    is_nested: bool = False


def _read_members(calls: CallReader, call: _Call) -> Reading[None]:
    reader = calls.reader
    yield from reader.expect("{")
    char = ","
    while char == ",":
        yield from reader.skip_space()
        yield from _read_member(calls, call)
        yield from reader.skip_space()
        char = yield from reader.peek()
        if char in (",", "}"):
            reader.skip(1)
    if char != "}":
        raise NotAsExpected


def _read_member(calls: CallReader, call: _Call) -> Reading[None]:
    reader = calls.reader
    key = yield from read_string(reader)
    if not (calls.is_marked or call.has_started or key in _BARE_KEYS):
        raise NotAsExpected
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    if key == "function" and call.name is None and (yield from reader.peek()) == "{":
        if call.is_nested:
            raise NotAsExpected
        call.is_nested = True
        yield from _read_members(calls, call)
    elif key in _NAMES and call.name is None:
        call.name = yield from read_string(reader)
        calls.check_name(call.name)
    elif key in _ARGUMENTS and call.arguments is None:
        yield from _read_arguments(calls, call)
    elif key in _NAMES or key in _ARGUMENTS:
        raise NotAsExpected  # repeated key
    else:
        yield from read_value(reader)


def _read_arguments(calls: CallReader, call: _Call) -> Reading[None]:
    reader = calls.reader
    if call.name is not None and (yield from reader.peek()) == "{":
        yield from calls.read_arguments(call.name)
        call.has_started, call.arguments = True, ""
        return
    pieces: list[str] = []
    with reader.recording(pieces.append):
        yield from read_value(reader)
    call.arguments = _object_text("".join(pieces))


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


@dataclass(frozen=True, slots=True)
class KeyedBody:
    """Object with the name as its only key: `{"add": {"a": 1}}`."""

    lists: bool = True

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""
        reader = calls.reader
        yield from reader.expect("{")
        yield from reader.skip_space()
        name = yield from read_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        yield from calls.read_arguments(name)
        yield from reader.skip_space()
        yield from reader.expect("}")
        calls.end()


# -- Names before JSON objects ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MistralBody:
    """JSON objects, or a name and its arguments: `add[ARGS]{"a": 1}`."""

    lists: bool = True

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""
        reader = calls.reader
        if (yield from reader.peek()) == "{":
            yield from JsonBody().read(calls)
            return
        name = yield from read_name(reader)
        if (yield from reader.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
            yield from reader.take(_CALL_ID)
            yield from reader.expect("[ARGS]")
        yield from reader.skip_space()
        yield from calls.read_arguments(name)


@dataclass(frozen=True, slots=True)
class KimiBody:
    """Id and arguments: `functions.add:0<|tool_call_argument_begin|>{"a": 1}`."""

    lists: bool = False

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call with the model's id. Raises NotAsExpected."""
        reader = calls.reader
        call_id = yield from read_name(reader)
        yield from reader.skip_space()
        yield from reader.expect("<|tool_call_argument_begin|>")
        yield from reader.skip_space()
        name, _, number = call_id.removeprefix("functions.").rpartition(":")
        if number.isdecimal() and name:
            yield from calls.read_arguments(name, call_id)
        else:
            yield from calls.read_arguments(call_id.removeprefix("functions."))


@dataclass(frozen=True, slots=True)
class DeepSeekBody:
    """Name and arguments, as of V3.1 or as of V3, which has the type before and a fence around."""

    lists: bool = False

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""
        reader = calls.reader
        name = yield from read_name(reader)
        yield from reader.expect(DEEPSEEK_SEPARATOR)
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from calls.read_arguments(name)
            return
        name = yield from read_name(reader)
        yield from reader.skip_space()
        yield from reader.expect("```json")
        yield from reader.skip_space()
        yield from calls.read_arguments(name)
        yield from reader.skip_space()
        yield from reader.one_of(("```",))


DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001


# -- Expressions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PythonBody:
    """Call as in Python, with keywords only: `add(a=1)`. `or_json`: it may be a JSON object."""

    or_json: bool = False
    lists: bool = True

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""
        reader = calls.reader
        if self.or_json and (yield from reader.peek()) == "{":
            yield from JsonBody().read(calls)
            return
        name = yield from read_name(reader)
        yield from reader.expect("(")
        if calls.opener == "<|python_tag|>":
            name = name.removesuffix(".call")
        calls.check_name(name)
        separator = "{"
        yield from reader.skip_space()
        while (yield from reader.peek()) != ")":
            key = yield from reader.take(_IDENTIFIER)
            yield from reader.skip_space()
            yield from reader.expect("=")
            yield from reader.skip_space()
            if not key or len(key) > MAX_KEY_CHARS:
                raise NotAsExpected
            if separator == "{":
                calls.start(name)
            calls.arguments(f'{separator}"{escaped(key)}": ')
            yield from read_literal(reader, PYTHON, calls.arguments)
            separator = ", "
            yield from reader.skip_space()
            if (yield from reader.peek()) == ",":
                reader.skip(1)
                yield from reader.skip_space()
        reader.skip(1)
        if separator == "{":
            calls.write(name, "{}")
        else:
            calls.arguments("}")
            calls.end()


@dataclass(frozen=True, slots=True)
class TypedBody:
    """Name and an object of Gemma's notation: `call:add{a:1,note:<|"|>x<|"|>}`."""

    dialect: Dialect
    lists: bool = False

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""
        reader = calls.reader
        yield from reader.expect("call:")
        name = yield from read_name(reader)
        if (yield from reader.peek()) != "{":
            raise NotAsExpected
        calls.start(name)
        yield from read_object(reader, self.dialect, calls.arguments)
        calls.end()
