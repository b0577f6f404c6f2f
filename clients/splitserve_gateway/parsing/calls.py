"""A call as a JSON object of a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitserve_gateway.parsing.json_reading import is_json, read_string, read_value
from splitserve_gateway.parsing.reader import NotAsExpected, Reader, Reading
from splitserve_gateway.parsing.writer import AnswerWriter
from splitserve_rpc.json_text import parse_json

# Schemas of the tools' parameters by the tools' names.
ToolSchemas = Mapping[str, Mapping[str, Any]]

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = ("name", *_ARGUMENTS, "type", "id")  # all that a call has which no mark announces
_MAX_QUOTED_CHARS = 65_536  # arguments that are written as a string are decoded in one go
_MAX_NAME_CHARS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[^\s<>{}\[\]]*")


@dataclass(slots=True)
class CallReader:
    """Reads calls and writes each once it is whole and as it should be.

    `barred`: names of tools that are not to be called.
    `streams_arguments`: arguments are written as they come, where the name came before them.
    `unwritten` has what was read since the last call was written: content, if it is no call.
    """

    reader: Reader
    writer: AnswerWriter
    tools: ToolSchemas
    barred: frozenset[str]
    streams_arguments: bool
    unwritten: list[str]

    def read_object(self, *, is_marked: bool, then: Callable[[], Reading[None]]) -> Reading[None]:
        """Reads and writes `{"name": ..., "arguments": {...}}`.

        Without a mark before it, it is a call only if the tool is known and has arguments.
        `then` reads what has to follow. Raises NotAsExpected.
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
        """A call that is whole. Raises NotAsExpected if the tool is barred."""
        self._check_name(name)
        self._write(_Call(name, arguments))

    def read_arguments_of(self, name: str) -> Reading[None]:
        """Reads and writes the arguments of a call whose name came before. Raises NotAsExpected."""
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
            raise NotAsExpected  # for the second time
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
    """The JSON object that `value` is, or says as a string; {} for null."""
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
    """Whether `text`, which JSON escapes made, has no half of a surrogate pair."""
    return text.isascii() or not _SURROGATE.search(text)


def read_name(reader: Reader) -> Reading[str]:
    """Reads the name of a tool that stands by itself. Raises NotAsExpected if there is none."""
    name = yield from reader.take(_NAME)
    if not name or len(name) > _MAX_NAME_CHARS:
        raise NotAsExpected
    return name
