"""Grammars put together, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import assert_never

from splitserve_client.types import Choices, Grammar, JsonSchema, Lark, Regex
from splitserve_gateway.parsing.reasoning import ReasoningMarks, ReasoningState

# Ids of special tokens by their texts. Grammars name them by id: text never has them.
SpecialTokens = Mapping[str, int]

ANY_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \t\r\n]{0,8}/"


def quoted(text: str) -> str:
    """`text`, as a rule has it."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, special_tokens: SpecialTokens) -> str:
    """`text`, or the special token that it is."""
    token_id = special_tokens.get(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def up_to(name: str, end: str, special_tokens: SpecialTokens) -> str:
    """The rule `name`: any text up to the first `end`, and that."""
    if end in special_tokens:
        return f"{name}: {ANY_TEXT} {marker(end, special_tokens)}\n"
    return f"{name}[suffix={quoted(end)}]: {ANY_TEXT}\n"


def embedded(grammar: Grammar) -> str:
    """`grammar` as the right side of a rule."""
    match grammar:
        case JsonSchema(schema):
            return f"%json {schema}"
        case Regex(pattern):
            return f"/{_escaped(pattern)}/"
        case Choices(texts):
            return " | ".join(map(quoted, texts))
        case Lark(text):
            return f"%lark {{\n{text}\n}}"
    assert_never(grammar)


def either(first: Grammar, second: Grammar) -> Lark:
    """An answer that is one of two."""
    return Lark(f"start: first | second\nfirst: {embedded(first)}\nsecond: {embedded(second)}\n")


def after_reasoning(
    grammar: Grammar, marks: ReasoningMarks, state: ReasoningState, special_tokens: SpecialTokens
) -> Grammar:
    """`grammar` for what follows reasoning; `state`: where the prompt ends.

    Where it has not begun, the model may reason or not.
    """
    if state is ReasoningState.CLOSED:
        return grammar
    reasoned = "reasoned" if state is ReasoningState.OPEN else "(opener reasoned)?"
    return Lark(
        f"start: {reasoned} answer\n"
        f"opener: {marker(marks.opener, special_tokens)}\n"
        f"reasoned: thoughts {_SPACE}\n"
        f"{up_to('thoughts', marks.closer, special_tokens)}"
        f"answer: {embedded(grammar)}\n"
    )


def _escaped(pattern: str) -> str:
    """A regex between slashes, on one line."""
    return re.sub(r"\\[\s\S]|[/\n\r]", _escape_one, pattern)


def _escape_one(match: re.Match[str]) -> str:
    found = match.group()
    by_name = {"\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r", "/": r"\/"}
    return by_name.get(found, found)
