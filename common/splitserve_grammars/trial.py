"""Protocol of the trial process, which finds out safely whether a grammar can be compiled.

A text of a few bytes may compile for hours, or crash the process, since its rules are followed by
recursion. So each grammar is tried in a process of its own, which can be killed. The parent writes
one line for each grammar to the trial process and reads one line for each; see `trial_process`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitserve_grammars.limits import MAX_ADDRESS_BYTES, STACK_BYTES
from splitserve_grammars.messages import TOO_LARGE, TOO_SLOW
from splitserve_rpc.json_text import parse_json

# Imports nothing from the working directory, and works if this package is not installed.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from splitserve_grammars.trial_process import main; main(*map(int, sys.argv[2:]))"
)
# Exit codes of a process that exceeded its memory or its stack.
_OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL)
MAX_LINE_BYTES = 1024**2  # limit of an answer, which may contain a grammar


class TrialUnavailable(Exception):
    """Error: no process could try a grammar. Not the fault of the grammar."""


class TrialTooSlow(Exception):
    """Error: a grammar used all the CPU time of its trial."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial. `error`: reason why the grammar is refused, else empty.

    `lark`: the grammar in Lark, if it was given in another dialect. `num_bytes`: heap size of the
    compiled grammar; 0 if it is refused.
    """

    error: str = ""
    lark: str = ""
    num_bytes: int = 0


def trial_command(
    max_address_bytes: int = MAX_ADDRESS_BYTES, stack_bytes: int = STACK_BYTES
) -> list[str]:
    """Returns the command line of the trial process."""
    root = Path(__file__).parents[1]
    arguments = [str(root), str(max_address_bytes), str(stack_bytes)]
    return [sys.executable, "-P", "-c", _START, *arguments]


def encode_task(kind: str, texts: Sequence[str], max_cpu_s: float) -> bytes:
    """Encodes a grammar as a line. `kind`: as for `grammar_text`, or gbnf."""
    return json.dumps([kind, list(texts), max_cpu_s]).encode() + b"\n"


def encode_verdict(verdict: Verdict) -> bytes:
    """Encodes the answer for a grammar as a line."""
    return json.dumps([verdict.error, verdict.lark, verdict.num_bytes]).encode() + b"\n"


def encode_end(exit_code: int) -> bytes:
    """Encodes the answer for a grammar whose process ended with `exit_code`."""
    return json.dumps([exit_code]).encode() + b"\n"


def decode_answer(line: bytes) -> Verdict:
    """Decodes an answer. Raises TrialTooSlow, and TrialUnavailable, also for an incomplete line."""
    if not line.endswith(b"\n"):
        raise TrialUnavailable("the process that tries grammars ended")
    answer = parse_json(line)
    return _verdict_on_exit(*answer) if len(answer) == 1 else Verdict(*answer)


def _verdict_on_exit(exit_code: int) -> Verdict:
    """Returns the verdict for a process that ended early. `exit_code`: negative for a signal.

    Raises TrialTooSlow for SIGPROF, TrialUnavailable for exits that are not the grammar's fault.
    """
    if exit_code == -signal.SIGPROF:
        raise TrialTooSlow(TOO_SLOW)
    if exit_code in _OUT_OF_MEMORY:
        return Verdict(TOO_LARGE)
    raise TrialUnavailable(f"the process that tried a grammar ended: {exit_code}")
