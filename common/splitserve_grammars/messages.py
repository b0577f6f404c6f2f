"""Messages about a grammar for the client that sent it."""

from __future__ import annotations

import re

NO_TEXT = "no text follows it"
TOO_SLOW = "it takes too much processor time to compile"
TOO_LARGE = "it takes too much memory to compile"
_BROKEN = "it could not be compiled"
_MAX_CHARS = 500
# Beginnings of llguidance's internal errors, and their meanings for clients.
_MEANINGS = {
    "panic": _BROKEN,
    "NoExtension": NO_TEXT,
    "parser error: Too many items": "there are too many ways to read a text, or to go on with it",
    "lexer error: too many": "its terminals have too many states or expressions",
    "oneOf constraints": "oneOf is supported only where its alternatives exclude each other",
}
# Part of an error about a regular expression, without the enclosing grammar.
_REGEX_ERROR = re.compile(r"regex parse error:\n.*?\n(error: [^\n]*)", re.DOTALL)
_OTHER_DOCUMENT = re.compile(r"Resource ('.*') is not present in a registry.*", re.DOTALL)


def error_message(error: str) -> str:
    """Returns an error of llguidance, shortened and without internals; empty for no error."""
    error = error.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    if not error:
        return ""
    for beginning, meaning in _MEANINGS.items():
        if error.startswith(beginning):
            return meaning
    if of_regex := _REGEX_ERROR.search(error):
        error = of_regex[0] if len(of_regex[0]) <= _MAX_CHARS else f"regex parse {of_regex[1]}"
    error = _OTHER_DOCUMENT.sub(r"\1 is another document, which is not read", error)
    return error if len(error) <= _MAX_CHARS else error[:_MAX_CHARS] + "..."
