"""Composition of grammars, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import assert_never

from splitserve_text import (
    Choices,
    Grammar,
    JsonSchema,
    Lark,
    ReasoningMarks,
    ReasoningState,
    Regex,
)

# Optional line break among the texts of `texts_in_order`.
MAYBE_LINE = "\n?"
ANY_TEXT = r"/(.|\n)*/"
_LITTLE_SPACE = '"x-guidance": {"whitespace_pattern": "[ ]?"}'
_SPACE = r"/[ \t\r\n]{0,8}/"


def quoted(text: str) -> str:
    """Returns `text` as a string literal of a rule."""
    return json.dumps(text, ensure_ascii=False)


def texts_in_order(texts: Sequence[str]) -> str:
    """Returns the part of a rule that matches `texts`, among which MAYBE_LINE may be."""
    literals = {MAYBE_LINE: f"{quoted(chr(10))}?"}
    return " ".join(literals.get(text) or quoted(text) for text in texts if text)


def text_regex(text: str) -> str:
    """Returns a regex for `text`, for use between slashes."""
    # Escapes no other characters: `\\<` would match the beginning of a word.
    return "".join(f"\\{char}" if char in "[](){}|/?*+.^$\\" else char for char in text).replace(
        "\n", "\\n"
    )


def without(*texts: str) -> str:
    """Returns the part of a terminal that matches any text without one of `texts` in it."""
    return f"{ANY_TEXT} & ~/(.|\\n)*({'|'.join(map(text_regex, texts))})(.|\\n)*/"


def up_to(name: str, end: str) -> str:
    """Returns a rule `name` that matches any text up to and including the first `end`."""
    return f"{name}[suffix={quoted(end)}]: {ANY_TEXT}\n"


def embedded(grammar: Grammar) -> str:
    """Returns `grammar` as the right side of a rule."""
    match grammar:
        case JsonSchema(schema):
            return f"%json {_with_little_space(schema)}"
        case Regex(pattern):
            return f"/{slashed(pattern)}/"
        case Choices(texts):
            return " | ".join(map(quoted, texts))
        case Lark(text):
            return f"%lark {{\n{text}\n}}"
    assert_never(grammar)


def as_sent(grammar: Grammar) -> Grammar:
    """Returns `grammar` as sent to schedulers.

    A JSON Schema allows at most one space between tokens.
    Otherwise a model that prefers white space may write nothing else until its tokens run out.
    """
    if isinstance(grammar, JsonSchema):
        return Lark(f"start: {embedded(grammar)}\n")
    return grammar


def either(first: Grammar, second: Grammar) -> Lark:
    """Returns a grammar for answers that match `first` or `second`."""
    return Lark(f"start: first | second\nfirst: {embedded(first)}\nsecond: {embedded(second)}\n")


def after_reasoning(grammar: Grammar, marks: ReasoningMarks, state: ReasoningState) -> Grammar:
    """Returns `grammar` with the reasoning that precedes it.

    `state`: reasoning state of the prompt.
    If reasoning has not begun, it is optional.
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
    """Adds the white space option to JSON text `schema`, which has no compiler options yet."""
    members = schema.strip().removeprefix("{").removesuffix("}").strip()
    if not schema.lstrip().startswith("{") or not members:
        members = ""  # boolean schema
    return "{" + _LITTLE_SPACE + (f", {members}" if members else "") + "}"


def slashed(pattern: str) -> str:
    """Escapes a regex for use between slashes on one line."""
    return re.sub(r"\\[\s\S]|[/\n\r]", _escape_one, pattern)


def _escape_one(match: re.Match[str]) -> str:
    found = match.group()
    by_name = {"\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r", "/": r"\/"}
    return by_name.get(found, found)
