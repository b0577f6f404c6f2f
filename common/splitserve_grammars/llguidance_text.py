"""Conversion of a grammar of the contract into the language of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from splitserve_common import parse_json
from splitserve_grammars.limits import MAX_GRAMMAR_BYTES

# no_forcing: any token that continues the text may be sampled, not only the tokenizer's choice.
_TOP = '%llguidance {"no_forcing": true}\nstart: @output'
# White space between JSON tokens: none, a space, or an indented new line. With unlimited spaces, a
# small model emits spaces until its sequence is cut.
_WHITE_SPACE = r"\x20|\n[\x20\x09]{0,32}"


def grammar_text(kind: str, texts: Sequence[str]) -> str:
    """Returns a grammar as text for LLMatcher. `kind`: json_schema, regex, lark or choices.

    Raises GrammarInvalid for a schema that is invalid JSON or sets options, a Lark grammar that
    sets options, and a lone surrogate. LLMatcher finds most other errors.
    """
    output = _output(kind, texts)
    top = {"name": "top", "lark_grammar": _TOP}
    grammars = {"grammars": [top, {"name": "output", **output}]}
    try:
        text = json.dumps(grammars, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError as error:
        raise GrammarInvalid("the schema is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise GrammarInvalid("it contains a lone surrogate") from error
    except ValueError as error:
        raise GrammarInvalid("the schema has a number that is too large") from error
    return text


def lark_of_gbnf(text: str) -> str:
    """Converts a grammar from llama.cpp's GBNF to Lark. Raises GrammarInvalid."""
    try:
        lark: str = gbnf_to_lark(text)
    # Any error of the converter is the fault of the grammar, which is untrusted.
    except Exception as error:
        raise GrammarInvalid(f"it is not valid GBNF: {error}") from error
    if len(lark.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarInvalid(f"converted to Lark, it has more than {MAX_GRAMMAR_BYTES} bytes")
    return lark


def _output(kind: str, texts: Sequence[str]) -> dict[str, Any]:
    if kind == "json_schema":
        return {"json_schema": _schema(texts[0])}
    if kind == "regex":
        return {"lark_grammar": _lark_of_regex(texts[0])}
    if kind == "lark":
        check_lark(texts[0])
        return {"lark_grammar": texts[0]}
    # A terminal is one automaton, however many choices there are.
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}


def _lark_of_regex(text: str) -> str:
    try:
        grammars: dict[str, Any] = parse_json(LLMatcher.grammar_from_regex(text))
    except UnicodeEncodeError as error:
        raise GrammarInvalid("it contains a lone surrogate") from error
    lark: str = grammars["grammars"][0]["lark_grammar"]
    return lark


def _schema(text: str) -> dict[str, Any]:
    """Parses a JSON schema and adds the options of llguidance. Raises GrammarInvalid."""
    try:
        schema = parse_json(text, parse_constant=_no_constant)
    except ValueError as error:
        raise GrammarInvalid(f"the schema is not valid JSON: {error}") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarInvalid("the schema is neither an object nor a boolean")
    if OPTIONS_KEY in schema:
        # These options could make llguidance ignore unsupported parts of the schema.
        raise GrammarInvalid(f"the schema has {OPTIONS_KEY}, which is not supported")
    return {**schema, OPTIONS_KEY: {"whitespace_pattern": _WHITE_SPACE}}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name}")


# -- Checks of Lark grammars for parts that llguidance accepts and splitserve does not -------------

OPTIONS_KEY = "x-guidance"
# Other options could make llguidance ignore unsupported parts of a schema.
_ALLOWED_OPTIONS = {"whitespace_pattern"}
# Skips strings, regular expressions and comments. Possessive quantifiers avoid reading long parts
# twice.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])++/?|(?P<name>@\w*)|%json(?P<json>\s*)',
    re.DOTALL,
)


class GrammarInvalid(Exception):
    """Error: a grammar cannot be compiled. The message gives the reason."""


def check_lark(text: str) -> None:
    """Raises GrammarInvalid for references to other grammars, and for schemas that set options.

    The only other grammars are those that enclose `text`.
    """
    position = 0
    while found := _PARTS.search(text, position):
        position = found.end()
        if found["name"]:
            raise GrammarInvalid(f"it refers to an unknown grammar: {found['name'][:64]}")
        if found["json"] is not None:
            position = _check_options(text, position)


def _check_options(text: str, position: int) -> int:
    """Checks the schema that begins at `position`; returns its end."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, position)
    except RecursionError as error:
        raise GrammarInvalid("a schema is nested too deeply") from error
    except ValueError as error:
        raise GrammarInvalid(f"a schema is not valid JSON: {error}") from error
    if isinstance(schema, dict) and OPTIONS_KEY in schema:
        options = schema[OPTIONS_KEY]
        if not isinstance(options, dict) or not options.keys() <= _ALLOWED_OPTIONS:
            raise GrammarInvalid(f"a schema has {OPTIONS_KEY}, which is not supported")
    return end
