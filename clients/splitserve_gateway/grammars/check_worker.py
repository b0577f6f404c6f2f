"""The process that compiles grammars, to see whether it can be done.

A line in, `[kind, text]`; a line out, `[error, lark]`, both JSON. It is started as a script, so
that it imports nothing but what it needs. What takes too much processor time or memory kills it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

_MAX_MESSAGE_CHARS = 500


def verdict(kind: str, text: str) -> tuple[str, str]:
    """What is wrong with a grammar, if anything is, and its Lark if it is in GBNF."""
    lark = ""
    try:
        match kind:
            case "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case "gbnf":
                lark = _to_lark(text)
                grammar = LLMatcher.grammar_from_lark(lark)
            case _:
                grammar = LLMatcher.grammar_from_lark(text)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        return _shortened(str(error)), ""
    return (_shortened(" ".join(messages)), "") if is_error else ("", lark)


def _to_lark(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    # Whatever a stranger's grammar makes the converter raise: it is the grammar's fault.
    except Exception as error:
        raise ValueError(f"is no GBNF: {error}") from error


def _shortened(message: str) -> str:
    message = message.strip() or "cannot be compiled"
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."


def main() -> None:
    """Answers until its input ends. Arguments: seconds of processor time for each, and MiB."""
    max_cpu_s, max_bytes = float(sys.argv[1]), int(sys.argv[2]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        reply = json.dumps(verdict(kind, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
