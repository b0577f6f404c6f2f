"""Checks of Lark grammars for parts that llguidance accepts and splitserve does not."""

from __future__ import annotations

import json
import re

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
            raise GrammarInvalid(f"it refers to a grammar {found['name'][:64]}: there is no other")
        if found["json"] is not None:
            position = _check_options(text, position)


def _check_options(text: str, position: int) -> int:
    """Checks the schema that begins at `position`; returns its end."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, position)
    except RecursionError as error:
        raise GrammarInvalid("a schema is nested too deeply") from error
    except ValueError as error:
        raise GrammarInvalid(f"a schema is no JSON: {error}") from error
    if isinstance(schema, dict) and OPTIONS_KEY in schema:
        options = schema[OPTIONS_KEY]
        if not isinstance(options, dict) or not options.keys() <= _ALLOWED_OPTIONS:
            raise GrammarInvalid(f"a schema has {OPTIONS_KEY}, which is not supported")
    return end
