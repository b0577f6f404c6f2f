"""What a Lark grammar may not say here, though llguidance would take it."""

from __future__ import annotations

import json
import re

OPTIONS_KEY = "x-guidance"
# By the others, what is not supported in a schema would be ignored.
_ALLOWED_OPTIONS = {"whitespace_pattern"}
# Strings, regular expressions and comments are passed over.
# What may be long is never read twice.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])++/?|(?P<name>@\w*)|%json(?P<json>\s*)',
    re.DOTALL,
)


class GrammarInvalid(Exception):
    """A grammar that cannot be compiled; the message says why."""


def check_lark(text: str) -> None:
    """Raises GrammarInvalid for other grammars by name, and for schemas in it that set options.

    Other grammars there are none but those that `text` is put into.
    """
    position = 0
    while found := _PARTS.search(text, position):
        position = found.end()
        if found["name"]:
            raise GrammarInvalid(f"it refers to a grammar {found['name'][:64]}: there is no other")
        if found["json"] is not None:
            position = _check_options(text, position)


def _check_options(text: str, position: int) -> int:
    """Returns where the schema ends that begins at `position`."""
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
