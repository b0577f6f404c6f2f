"""The notations in which models call tools."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from splitserve_gateway.parsing.calls import CallReader, read_name
from splitserve_gateway.parsing.reader import NotAsExpected, Reading
from splitserve_gateway.parsing.tagged_calls import read_tagged_call

_ID_CHARS = string.ascii_letters + string.digits
_CALL_ID = re.compile(r"[0-9A-Za-z_-]*")


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models calls tools.

    `opener`: the text that announces calls; "" if there is none. `markers`: all texts of the
    notation which may be special tokens of a model. `read`: reads what follows the opener.
    `may_be_bare`: calls may also stand at the very beginning of an answer without the opener.
    """

    name: str
    opener: str
    markers: tuple[str, ...]
    read: Callable[[CallReader, bool], Reading[None]]
    may_be_bare: bool = False
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        """An id for a call that no other call has."""
        return self.id_prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(self.id_length))


def _read_hermes(calls: CallReader, is_marked: bool) -> Reading[None]:
    reader = calls.reader

    def closing() -> Reading[None]:
        yield from reader.skip_space()
        # Some models forget to close before they open again, or end.
        if (yield from reader.one_of(("</tool_call>",))) is None:
            following = yield from reader.peek(len("<tool_call>"))
            if following not in ("", "<tool_call>"):
                raise NotAsExpected

    yield from reader.skip_space()
    if (yield from reader.peek()) == "<":
        name, arguments = yield from read_tagged_call(reader, calls.tools)
        yield from closing()
        calls.write(name, arguments)
    else:
        yield from calls.read_object(is_marked=is_marked, then=closing)


def _read_mistral(calls: CallReader, is_marked: bool) -> Reading[None]:
    reader = calls.reader
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char in ("[", "{"):
        yield from _read_objects(calls, is_marked)
        return
    name = yield from read_name(reader)
    if (yield from reader.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
        yield from reader.take(_CALL_ID)
        yield from reader.expect("[ARGS]")
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise NotAsExpected
    yield from calls.read_arguments_of(name)


def _read_objects(calls: CallReader, is_marked: bool) -> Reading[None]:
    """An array of calls, or calls one after the other; what follows these is content."""
    reader = calls.reader
    yield from reader.skip_space()
    is_array = (yield from reader.peek()) == "["
    if is_array:
        reader.skip(1)
        yield from reader.skip_space()
    while True:
        yield from calls.read_object(is_marked=is_marked, then=_nothing)
        yield from reader.skip_space()
        char = yield from reader.peek()
        if char == "]" and is_array:
            reader.skip(1)
            return
        if char == "":
            return
        if char in (",", ";"):
            reader.skip(1)
            yield from reader.skip_space()
        elif is_array or char != "{":
            raise NotAsExpected


def _nothing() -> Reading[None]:
    yield from ()


HERMES = ToolCallFormat("hermes", "<tool_call>", ("<tool_call>", "</tool_call>"), _read_hermes)
LLAMA3_JSON = ToolCallFormat(
    "llama3_json", "<|python_tag|>", ("<|python_tag|>",), _read_objects, may_be_bare=True
)
# Mistral's templates take no other ids than those of nine letters and digits.
MISTRAL = ToolCallFormat(
    "mistral",
    "[TOOL_CALLS]",
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    _read_mistral,
    id_prefix="",
    id_length=9,
)
# How later models of Mistral spell calls; both spellings are read alike.
MISTRAL_ARGS = replace(MISTRAL, name="mistral_args")
JSON = ToolCallFormat("json", "", (), _read_objects, may_be_bare=True)

FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, JSON)}
