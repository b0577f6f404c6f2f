"""Whether a grammar can be compiled at all, found out where it can do no harm.

A text of a few bytes may compile for hours, or end the process that tries (its rules are followed
by recursion). So each is tried in a process of its own, which can be ended. Whoever starts that
process writes it one line for each grammar and reads one for each; see `trial_process`.
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

# What lies in the working directory is not imported, and this package need not be installed.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from splitserve_grammars.trial_process import main; main(*map(int, sys.argv[2:]))"
)
# How a process ends that was given more than it may use, of memory or of its stack.
_OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL)
MAX_LINE_BYTES = 1024**2  # of an answer, which may have a grammar in it


class TrialUnavailable(Exception):
    """No process could say anything of a grammar; that is not the grammar's fault."""


class TrialTooSlow(Exception):
    """A grammar took all the processor time that its trial was given."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error`: why a grammar is not taken, if it is not. `lark`: of one in another dialect.

    `num_bytes`: of the heap, that it takes when it is compiled; 0 if it is not.
    """

    error: str = ""
    lark: str = ""
    num_bytes: int = 0


def trial_command(
    max_address_bytes: int = MAX_ADDRESS_BYTES, stack_bytes: int = STACK_BYTES
) -> list[str]:
    """What starts the process."""
    root = Path(__file__).parents[1]
    arguments = [str(root), str(max_address_bytes), str(stack_bytes)]
    return [sys.executable, "-P", "-c", _START, *arguments]


def encode_task(kind: str, texts: Sequence[str], max_cpu_s: float) -> bytes:
    """The line for a grammar: `kind` as for `grammar_text`, or gbnf."""
    return json.dumps([kind, list(texts), max_cpu_s]).encode() + b"\n"


def encode_verdict(verdict: Verdict) -> bytes:
    """The line that answers."""
    return json.dumps([verdict.error, verdict.lark, verdict.num_bytes]).encode() + b"\n"


def encode_end(exit_code: int) -> bytes:
    """The line that answers for a process that ended over its grammar."""
    return json.dumps([exit_code]).encode() + b"\n"


def decode_answer(line: bytes) -> Verdict:
    """Raises TrialTooSlow; TrialUnavailable, also if nobody was there to end the line."""
    if not line.endswith(b"\n"):
        raise TrialUnavailable("the process that tries grammars ended")
    answer = parse_json(line)
    return _verdict_on_exit(*answer) if len(answer) == 1 else Verdict(*answer)


def _verdict_on_exit(exit_code: int) -> Verdict:
    """What the end of a process means for its grammar; a signal is a negative number."""
    if exit_code == -signal.SIGPROF:
        raise TrialTooSlow(TOO_SLOW)
    if exit_code in _OUT_OF_MEMORY:
        return Verdict(TOO_LARGE)
    raise TrialUnavailable(f"the process that tried a grammar ended: {exit_code}")
