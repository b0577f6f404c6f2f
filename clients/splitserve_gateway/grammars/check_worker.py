"""The process that compiles grammars, to see whether it can be done.

A line in, `[kind, text]`; a line out, `[error, lark]`, both JSON. It is started as a script, so
that it imports nothing but what it needs. What takes too much processor time or memory kills it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

_MAX_MESSAGE_CHARS = 500
_NICENESS = 10  # streams that are open come first
# What executors give a grammar, so that what is taken here is not refused there.
_PARSER_LIMITS: dict[str, Any] = {
    "step_max_items": 2000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_STACK_BYTES = 256 * 1024**2  # rules that refer to each other are followed by recursion
_DEAD_END = "NoExtensionBias"
_TOP = '%llguidance {"no_forcing": true}\nstart: @output'


def verdict(tokenizer: LLTokenizer, kind: str, text: str) -> tuple[str, str]:
    """What is wrong with a grammar, if anything is, and its Lark if it is in GBNF."""
    try:
        lark = _to_lark(text) if kind == "gbnf" else ""
        output = _output(kind, lark or text)
    except ValueError as error:
        return _shortened(str(error)), ""
    top = {"name": "top", "lark_grammar": _TOP}
    grammar = json.dumps({"grammars": [top, {"name": "output", **output}]}, ensure_ascii=False)
    limits = LLParserLimits(**_PARSER_LIMITS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    wrong = matcher.get_error() or _first_step_error(matcher)
    return (_shortened(wrong), "") if wrong else ("", lark)


def _first_step_error(matcher: LLMatcher) -> str:
    """What goes wrong at the beginning of every text, if anything does."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if mask:
        matcher.consume_token((mask & -mask).bit_length() - 1)
        matcher.compute_bitmask()
    error: str = matcher.get_error()
    return "no text follows it" if not mask or error.startswith(_DEAD_END) else error


def _output(kind: str, text: str) -> dict[str, Any]:
    """`text` as llguidance takes it. Raises ValueError."""
    if kind == "json_schema":
        return {"json_schema": _schema(text)}
    if kind == "regex":
        of_regex = json.loads(LLMatcher.grammar_from_regex(text))
        return {"lark_grammar": of_regex["grammars"][0]["lark_grammar"]}
    return {"lark_grammar": text}


def _schema(text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the schema is no JSON: {error}") from error
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ValueError("the schema is neither an object nor a boolean")
    if "x-guidance" in schema:
        # By these options, what is not supported would be ignored.
        raise ValueError("the schema has x-guidance, which is not supported")
    return schema


def _to_lark(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    # Whatever a stranger's grammar makes the converter raise: it is the grammar's fault.
    except Exception as error:
        raise ValueError(f"is no GBNF: {error}") from error


def _shortened(message: str) -> str:
    message = message.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    message = message or "cannot be compiled"
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."


def answer_all(max_cpu_s: float) -> None:
    """Answers until the input ends. A grammar that takes `max_cpu_s` ends the process."""
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        reply = json.dumps(verdict(tokenizer, kind, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    """Arguments: seconds of processor time for each grammar, and MiB of address space."""
    os.nice(_NICENESS)
    max_cpu_s, max_bytes = float(sys.argv[1]), int(sys.argv[2]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=answer_all, args=(max_cpu_s,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
