"""Limits for the cost of a grammar."""

from __future__ import annotations

import re
from typing import Any

MAX_GRAMMAR_BYTES = 65_536  # UTF-8 bytes of all texts together; limit of the contract
MAX_CHOICES = 1024

# CPU time of a trial. The first trial is short, so that no caller waits long behind a hard grammar:
# schemas of 64 KiB take 30 to 150 ms.
FIRST_TRIAL_CPU_S = 0.1
MAX_COMPILE_CPU_S = 0.5
# A process that takes this long, for lack of a CPU, is given up, and the next one tries the
# grammar.
MAX_TRIAL_WALL_S = 20.0
NUM_TRIES = 2
# Address space of a trial process, including its stack. llguidance follows rules by recursion; a
# text of 64 KiB has some 6000 rules.
MAX_ADDRESS_BYTES = 1024**3
STACK_BYTES = 256 * 1024**2
# Heap of a compiled grammar: schemas of 64 KiB take 5 MB.
MAX_COMPILED_BYTES = 16 * 1024**2

_MAX_LEXER_STATES = 12_000
# Keyword arguments of LLParserLimits. A mask uses up to 14 000 units of fuel per millisecond. An
# ambiguous grammar has items for each way to parse a text.
PARSER_LIMITS: dict[str, Any] = {
    "step_max_items": 2000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": _MAX_LEXER_STATES,
    "verbose_errors": False,
}
# Maximum size of the lexer of a compiled grammar, with up to 1.1 KB per state.
MAX_LEXER_BYTES = 1_100 * _MAX_LEXER_STATES


# -- Messages for the client that sent a grammar ------------------------------------------

NO_TEXT = "no text matches it"
TOO_SLOW = "it takes too much processor time"
TOO_LARGE = "it takes too much memory"
# Begins what is said of an answer whose schema could not be checked.
NOT_CHECKED = "not checked: "
_BROKEN = "it could not be compiled"
_MAX_CHARS = 500
# Beginnings of llguidance's internal errors, and their meanings for clients.
_MEANINGS = {
    "panic": _BROKEN,
    "NoExtension": NO_TEXT,
    "parser error: Too many items": "there are too many ways to parse or continue a text",
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
    error = _OTHER_DOCUMENT.sub(
        r"\1 is another document; external references are not supported", error
    )
    return error if len(error) <= _MAX_CHARS else error[:_MAX_CHARS] + "..."
