"""Literals of Python and of Gemma's notation, rewritten as JSON while they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from splitserve_text.answer_reader import NotAsExpected, Reader, Reading, stops_of
from splitserve_text.json_reader import MAX_DEPTH

Write = Callable[[str], None]

_MAX_SCALAR_CHARS = 1024
_SCALAR_CHARS = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_KEY = re.compile(r"[^\s:,\"<>{}\[\]]*")
_HEX = re.compile("[0-9a-fA-F]+")
_MAX_CODE = 0x10FFFF
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_SIMPLE_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_WORDS = {
    "True": "true", "False": "false", "None": "null",
    "true": "true", "false": "false", "null": "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """Notation of values.

    `quotes`: texts around strings. `has_escapes`: strings have Python's escapes; otherwise they are
    verbatim. `has_bare_keys`: keys of objects may stand without quotes. `words`: JSON by word.
    """

    quotes: tuple[str, ...]
    has_escapes: bool = False
    has_bare_keys: bool = True
    words: Mapping[str, str] = field(default_factory=lambda: _WORDS)


PYTHON = Dialect(("'", '"'), has_escapes=True, has_bare_keys=False)
GEMMA = Dialect(('<|"|>',))
FUNCTION_GEMMA = Dialect(("<escape>",))


def escaped(text: str) -> str:
    """Returns `text` as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_literal(reader: Reader, dialect: Dialect, write: Write, depth: int = 0) -> Reading[None]:
    """Reads one value and passes it to `write` as JSON, in pieces. Raises NotAsExpected."""
    if depth > MAX_DEPTH:
        raise NotAsExpected
    quote = yield from reader.one_of(dialect.quotes)
    if quote is not None:
        yield from _read_string(reader, dialect, quote, write)
        return
    char = yield from reader.peek()
    if char == "{":
        yield from read_object(reader, dialect, write, depth)
    elif char == "[" or (char == "(" and dialect.has_escapes):
        yield from _read_array(reader, dialect, write, depth)
    else:
        text = yield from reader.take(_SCALAR_CHARS)
        if text in dialect.words:
            write(dialect.words[text])
        elif len(text) <= _MAX_SCALAR_CHARS and _NUMBER.fullmatch(text):
            write(text)
        else:
            raise NotAsExpected


def python_as_json(text: str) -> str | None:
    """Returns the Python literal `text` as JSON; None if it is none."""
    reader = Reader()
    reader.feed(text.strip())
    reader.end()
    pieces: list[str] = []
    try:
        for _ in read_literal(reader, PYTHON, pieces.append):
            raise AssertionError("the text is complete")
    except NotAsExpected:
        return None
    return "".join(pieces) if reader.is_at_end else None


def read_object(reader: Reader, dialect: Dialect, write: Write, depth: int = 0) -> Reading[None]:
    """Reads an object like `read_literal`. Raises NotAsExpected."""
    yield from reader.expect("{")
    write("{")
    separator = ""
    while not (yield from _has_closed(reader, "}")):
        write(separator)
        quote = yield from reader.one_of(dialect.quotes)
        key = ""
        if quote is not None:
            yield from _read_string(reader, dialect, quote, write)
        else:
            key = yield from reader.take(_KEY)
            if not (key and dialect.has_bare_keys):
                raise NotAsExpected
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        write(": " if quote is not None else f'"{escaped(key)}": ')
        yield from read_literal(reader, dialect, write, depth + 1)
        yield from _separate(reader, "}")
        separator = ", "
    write("}")


def _read_array(reader: Reader, dialect: Dialect, write: Write, depth: int) -> Reading[None]:
    closer = "]" if (yield from reader.peek()) == "[" else ")"
    reader.skip(1)
    write("[")
    separator = ""
    while not (yield from _has_closed(reader, closer)):
        write(separator)
        yield from read_literal(reader, dialect, write, depth + 1)
        yield from _separate(reader, closer)
        separator = ", "
    write("]")


def _has_closed(reader: Reader, closer: str) -> Reading[bool]:
    yield from reader.skip_space()
    if (yield from reader.peek()) != closer:
        return False
    reader.skip(1)
    return True


def _separate(reader: Reader, closer: str) -> Reading[None]:
    """Reads a comma unless `closer` comes next."""
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char == ",":
        reader.skip(1)
    elif char != closer:
        raise NotAsExpected


def _read_string(reader: Reader, dialect: Dialect, quote: str, write: Write) -> Reading[None]:
    """Reads a string whose opening quote was read."""
    write('"')
    if dialect.has_escapes and (yield from reader.one_of((quote * 2,))) is not None:
        quote *= 3
    yield from _read_text(reader, dialect, quote, write)
    write('"')


def _read_text(reader: Reader, dialect: Dialect, quote: str, write: Write) -> Reading[None]:
    stops = stops_of(frozenset((quote, "\\") if dialect.has_escapes else (quote,)))

    def write_text(text: str) -> None:
        write(escaped(text))

    while True:
        stop = yield from reader.until(stops, write_text, leaves_beginning=True)
        if stop == quote:
            return
        if stop is None:
            raise NotAsExpected
        yield from _read_escape(reader, write)


def _read_escape(reader: Reader, write: Write) -> Reading[None]:
    char = yield from reader.peek()
    if not char:
        raise NotAsExpected
    if char in _SIMPLE_ESCAPES:
        reader.skip(1)
        write(escaped(_SIMPLE_ESCAPES[char]))
        return
    length = _HEX_LENGTHS.get(char, 0)
    digits = (yield from reader.peek(1 + length))[1:]
    if len(digits) < length:
        raise NotAsExpected
    if length and _HEX.fullmatch(digits) and (code := int(digits, 16)) <= _MAX_CODE:
        reader.skip(1 + length)
        # Halves of a pair of surrogates are written as escapes, which JSON joins.
        write(f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else escaped(chr(code)))
    else:  # no escape in Python
        write("\\\\")
