"""Grammars put together, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import assert_never

from splitserve_client.types import Choices, Grammar, JsonSchema, Lark, Regex
from splitserve_gateway.parsing.reasoning import ReasoningMarks, ReasoningState

ANY_TEXT = r"/(.|\n)*/"
_LITTLE_SPACE = '"x-guidance": {"whitespace_pattern": "[ ]?"}'
_SPACE = r"/[ \t\r\n]{0,8}/"


def quoted(text: str) -> str:
    """`text`, as a rule has it."""
    return json.dumps(text, ensure_ascii=False)


def up_to(name: str, end: str) -> str:
    """The rule `name`: any text up to the first `end`, and that."""
    return f"{name}[suffix={quoted(end)}]: {ANY_TEXT}\n"


def embedded(grammar: Grammar) -> str:
    """`grammar` as the right side of a rule."""
    match grammar:
        case JsonSchema(schema):
            return f"%json {_with_little_space(schema)}"
        case Regex(pattern):
            return f"/{_escaped(pattern)}/"
        case Choices(texts):
            return " | ".join(map(quoted, texts))
        case Lark(text):
            return f"%lark {{\n{text}\n}}"
    assert_never(grammar)


def as_sent(grammar: Grammar) -> Grammar:
    """`grammar`; of a JSON Schema one that allows no more than a space between two tokens.

    Otherwise a model that likes white space writes nothing else until its tokens run out.
    """
    if isinstance(grammar, JsonSchema):
        return Lark(f"start: {embedded(grammar)}\n")
    return grammar


def either(first: Grammar, second: Grammar) -> Lark:
    """An answer that is one of two."""
    return Lark(f"start: first | second\nfirst: {embedded(first)}\nsecond: {embedded(second)}\n")


def after_reasoning(grammar: Grammar, marks: ReasoningMarks, state: ReasoningState) -> Grammar:
    """`grammar` for what follows reasoning; `state`: where the prompt ends.

    Where it has not begun, the model may reason or not.
    """
    if state is ReasoningState.CLOSED:
        return grammar
    reasoned = "reasoned" if state is ReasoningState.OPEN else "(opener reasoned)?"
    return Lark(
        f"start: {reasoned} answer\n"
        f"opener: {quoted(marks.opener)}\n"
        f"reasoned: thoughts {_SPACE}\n"
        f"{up_to('thoughts', marks.closer)}"
        f"answer: {embedded(grammar)}\n"
    )


def _with_little_space(schema: str) -> str:
    """`schema`, which is JSON text and has no options for the compiler, with one."""
    members = schema.strip().removeprefix("{").removesuffix("}").strip()
    if not schema.lstrip().startswith("{") or not members:
        members = ""  # `true`
    return "{" + _LITTLE_SPACE + (f", {members}" if members else "") + "}"


def _escaped(pattern: str) -> str:
    """A regex between slashes, on one line."""
    return re.sub(r"\\[\s\S]|[/\n\r]", _escape_one, pattern)


def _escape_one(match: re.Match[str]) -> str:
    found = match.group()
    by_name = {"\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r", "/": r"\/"}
    return by_name.get(found, found)
