"""Tool calls in tags, whose values are texts: rewritten as JSON by the schemas of the tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitserve_text.answer_reader import NotAsExpected, Reader, Reading, stops_of
from splitserve_text.json_reader import is_json
from splitserve_text.literals import escaped, python_as_json
from splitserve_text.tool_calls import MAX_KEY_CHARS, CallReader, read_name

_MAX_VALUE_CHARS = 65_536  # longer values are strings: checking for JSON takes one step


@dataclass(frozen=True, slots=True)
class Tags:
    """Texts of a call in tags: before the name, before a key, after a value, and after the call.

    `quote`: text after names and keys; attributes may follow it. `has_lines`: values stand on lines
    of their own.
    """

    function: str
    parameter: str
    end_of_parameter: str
    end_of_function: str
    quote: str = ""
    has_lines: bool = False


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """Name and parameters in tags: `<function=add><parameter=a>1</parameter></function>`.

    A value is text. It counts as JSON if the tag says so, or if the parameter's schema has types
    other than string and the value parses. Instead of parameters, a JSON object may follow.
    """

    tags: Tags
    lists: bool = False

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call. Raises NotAsExpected."""
        reader, tags = calls.reader, self.tags
        if calls.opener != tags.function:
            yield from reader.expect(tags.function)
        calls.opener = ""
        name, _ = yield from self._read_head(reader)
        calls.check_name(name)
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from calls.read_arguments(name)
            yield from reader.skip_space()
            yield from reader.expect(tags.end_of_function)
            calls.end()
            return
        arguments = Arguments(calls, name, has_lines=tags.has_lines)
        while True:
            tag = yield from reader.one_of((tags.parameter, tags.end_of_function))
            if tag is None:
                raise NotAsExpected
            if tag == tags.end_of_function:
                break
            key, attributes = yield from self._read_head(reader)
            is_string = 'string="true"' in attributes if 'string="' in attributes else None
            yield from arguments.read(key, tags.end_of_parameter, is_string)
            yield from reader.skip_space()
        arguments.end()

    def _read_head(self, reader: Reader) -> Reading[tuple[str, str]]:
        """Reads the rest of a tag; returns its name and its attributes."""
        quote = self.tags.quote
        name = yield from _read_up_to(reader, f"{quote}<>\n")
        if quote:
            yield from reader.expect(quote)
        attributes = yield from _read_up_to(reader, "<>\n")
        yield from reader.expect(">")
        return name, attributes


@dataclass(frozen=True, slots=True)
class KeyValueBody:
    """Name, then keys and values: `add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""

    lists: bool = False

    def read(self, calls: CallReader) -> Reading[None]:
        """Reads and writes one call, with the tag after it. Raises NotAsExpected."""
        reader = calls.reader
        name = yield from read_name(reader)
        yield from reader.skip_space()
        yield from reader.one_of(("<tool_sep>",))
        arguments = Arguments(calls, name)
        while True:
            yield from reader.skip_space()
            tag = yield from reader.one_of(("<arg_key>", "</tool_call>"))
            if tag is None:
                raise NotAsExpected
            if tag == "</tool_call>":
                break
            key = yield from _read_up_to(reader, "<\n")
            yield from reader.expect("</arg_key>")
            yield from reader.skip_space()
            yield from reader.expect("<arg_value>")
            yield from arguments.read(key, "</arg_value>")
        arguments.end()


@dataclass(slots=True)
class Arguments:
    """Arguments that come value by value, written as a JSON object.

    `has_lines`: line breaks after the beginning and before the end of a value are dropped.
    """

    calls: CallReader
    name: str
    has_lines: bool = False
    num_written: int = 0

    def read(self, key: str, end: str, is_string: bool | None = None) -> Reading[None]:
        """Reads a value up to the text `end` and writes it with its key. Raises NotAsExpected.

        `is_string`: None to decide by the schema.
        """
        calls = self.calls
        key = key.strip()
        if not key:
            raise NotAsExpected
        properties = calls.tools.get(self.name, {}).get("properties")
        types = json_types(properties.get(key) if isinstance(properties, Mapping) else None)
        if is_string is None:
            is_string = not types or "string" in types
        may_be_null = "null" in types
        self.begin()
        calls.arguments(f'{", " if self.num_written else ""}"{escaped(key)}": ')
        self.num_written += 1
        if self.has_lines and (yield from calls.reader.peek()) == "\n":
            calls.reader.skip(1)
        if may_be_null and (yield from calls.reader.one_of(self._nulls(end))) is not None:
            calls.arguments("null")
        elif is_string:
            yield from self._read_string(end)
        else:
            yield from self._read_value(end)

    def begin(self) -> None:
        """Starts the call unless it has started."""
        if not self.calls.is_open:
            self.calls.start(self.name)
            self.calls.arguments("{")

    def end(self) -> None:
        """Ends the call."""
        self.begin()
        self.calls.arguments("}")
        self.calls.end()

    def _read_string(self, end: str) -> Reading[None]:
        calls = self.calls
        held = ""

        def write(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if self.has_lines and text.endswith("\n") else ""
            calls.writer.call_arguments(escaped(text.removesuffix(held)))

        calls.arguments('"')
        stops = stops_of(frozenset((end,)))
        if (yield from calls.reader.until(stops, write, leaves_beginning=True)) is None:
            raise NotAsExpected
        calls.arguments('"')

    def _nulls(self, end: str) -> tuple[str, ...]:
        return (f"null{end}", *([f"null\n{end}"] if self.has_lines else []))

    def _read_value(self, end: str) -> Reading[None]:
        calls = self.calls
        pieces: list[str] = []
        stops = stops_of(frozenset((end,)))
        stop = yield from calls.reader.until(stops, pieces.append, leaves_beginning=True)
        text = "".join(pieces)
        if stop is None:
            raise NotAsExpected
        text = text.removesuffix("\n") if self.has_lines else text
        calls.arguments(_value_text(text))


def _read_up_to(reader: Reader, stops: str) -> Reading[str]:
    """Reads a name or key up to one of the characters `stops`. Raises NotAsExpected if too long."""
    pieces: list[str] = []
    while (char := (yield from reader.peek())) not in stops:  # the empty text is in any text
        if len(pieces) == MAX_KEY_CHARS:
            raise NotAsExpected
        pieces.append(char)
        reader.skip(1)
    return "".join(pieces)


def _value_text(text: str) -> str:
    """Returns the text of a value as JSON; a text that is no JSON becomes a string."""
    if len(text) <= _MAX_VALUE_CHARS:
        if is_json(text):
            return text.strip()
        # Some templates write values as Python does.
        if (value := python_as_json(text)) is not None:
            return value
    return f'"{escaped(text)}"'


def json_types(schema: object) -> set[str]:
    """Returns the JSON types that `schema` names; empty if it names none.

    Values in tags are strings where `string` is among them, or none is named.
    """
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    types = {each for each in listed if isinstance(each, str) and each}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            types |= json_types(option)
    return types or ({"object"} if "$ref" in schema else set())
