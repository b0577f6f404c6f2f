"""Incremental reading of JSON values.

Values are checked strictly (RFC 8259), character by character, without building them.
"""

from __future__ import annotations

import re

from splitserve_common import parse_json
from splitserve_text.answer_reader import NotAsExpected, Reader, Reading

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
