"""Trial process: compiles grammars only to find out whether they can be compiled; see `trial`."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from splitserve_common import parse_json
from splitserve_grammars.limits import (
    MAX_COMPILED_BYTES,
    NO_TEXT,
    PARSER_LIMITS,
    TOO_LARGE,
    error_message,
)
from splitserve_grammars.llguidance_text import GrammarInvalid, grammar_text, lark_of_gbnf
from splitserve_grammars.trial import GrammarTrialResult, encode_end, encode_verdict

_NICENESS = 10  # open streams have precedence
# Heap of schemas of 64 KiB, assumed if the C library cannot tell the size.
_USUAL_BYTES = 5_000_000


def try_grammar(tokenizer: LLTokenizer, kind: str, texts: Sequence[str]) -> GrammarTrialResult:
    """Compiles a grammar and follows it for one token. Returns the verdict."""
    lark = ""
    try:
        if kind == "gbnf":
            lark = lark_of_gbnf(texts[0])
            kind, texts = "lark", [lark]
        text = grammar_text(kind, texts)
    except GrammarInvalid as invalid:
        return GrammarTrialResult(error_message(str(invalid)))
    before = _heap_bytes()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    num_bytes = max(0, _heap_bytes() - before) if before else _USUAL_BYTES
    error = error_message(matcher.get_error()) or _first_step_error(matcher)
    if not error and num_bytes > MAX_COMPILED_BYTES:
        error = TOO_LARGE
    return (
        GrammarTrialResult(error) if error else GrammarTrialResult(lark=lark, num_bytes=num_bytes)
    )


def _first_step_error(matcher: LLMatcher) -> str:
    """Returns the error of the first token of any text; empty if there is none."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if mask:
        matcher.consume_token((mask & -mask).bit_length() - 1)
        matcher.compute_bitmask()
    return error_message(matcher.get_error()) if mask else NO_TEXT


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _heap_bytes() -> int:
    """Returns the heap in use by the whole process, in bytes; 0 if unknown."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _HeapInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


# Tries a text of a kind, as `try_grammar` does.
Try = Callable[[str, Sequence[str]], GrammarTrialResult]


def _answer(attempt: Try, line: bytes) -> bytes:
    """Returns the answer to a line, computed in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        # llguidance follows rules by recursion. Only a thread can have a large stack.
        thread = threading.Thread(target=_answer_as_child, args=(attempt, line, writer))
        thread.start()
        thread.join()
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer if answer.endswith(b"\n") else encode_end(exit_code)


def _answer_as_child(attempt: Try, line: bytes, writer: int) -> None:
    kind, texts, max_cpu_s = parse_json(line)
    # SIGPROF ends the process after `max_cpu_s`.
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    verdict = attempt(kind, texts)
    signal.setitimer(signal.ITIMER_PROF, 0)
    with open(writer, "wb") as answers:
        answers.write(encode_verdict(verdict))


def serve(attempt: Try, max_address_bytes: int, stack_bytes: int) -> None:
    """Answers lines by `attempt` until the input ends.

    Each line gets a fork of this process. Starting a new process after a text that used too much
    would take as long as a first trial.
    """
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (max_address_bytes, max_address_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_answer(attempt, line))
        sys.stdout.buffer.flush()


def main(max_address_bytes: int, stack_bytes: int) -> None:
    """Tries grammars until the input ends."""
    # One token per byte: a grammar that is slow is slow with any vocabulary.
    serve(partial(try_grammar, LLTokenizer("byte")), max_address_bytes, stack_bytes)
