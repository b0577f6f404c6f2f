"""Protocol of the trial process, which finds out safely whether a grammar can be compiled.

A text of a few bytes may compile for hours, or crash the process, since its rules are followed by
recursion. So each grammar is tried in a process of its own, which can be killed. The parent writes
one line for each grammar to the trial process and reads one line for each; see `trial_process`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from splitserve_common import parse_json
from splitserve_grammars.limits import (
    MAX_ADDRESS_BYTES,
    MAX_TRIAL_WALL_S,
    NUM_TRIES,
    STACK_BYTES,
    TOO_LARGE,
    TOO_SLOW,
)

# Imports nothing from the working directory, and works if this package is not installed.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from splitserve_grammars.{module} import main; main(*map(int, sys.argv[2:]))"
)
# Exit codes of a process that exceeded its memory or its stack.
_OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL)
MAX_LINE_BYTES = 1024**2  # limit of an answer, which may contain a grammar


class TrialUnavailable(Exception):
    """Error: no process could try a grammar. Not the fault of the grammar."""


class TrialTooSlow(Exception):
    """Error: a grammar used all the CPU time of its trial."""


@dataclass(frozen=True, slots=True)
class GrammarTrialResult:
    """Result of a trial. `error`: reason why the grammar is refused, else empty.

    `lark`: the grammar in Lark, if it was given in another dialect. `num_bytes`: heap size of the
    compiled grammar; 0 if it is refused.
    """

    error: str = ""
    lark: str = ""
    num_bytes: int = 0


TrialKind = Literal["grammar", "answer"]
_MODULES: dict[TrialKind, str] = {"grammar": "trial_process", "answer": "answer_process"}


def trial_command(
    max_address_bytes: int = MAX_ADDRESS_BYTES,
    stack_bytes: int = STACK_BYTES,
    kind: TrialKind = "grammar",
) -> list[str]:
    """Returns the command line of the trial process. `kind`: what it tries."""
    root = Path(__file__).parents[1]
    arguments = [str(root), str(max_address_bytes), str(stack_bytes)]
    return [sys.executable, "-P", "-c", _START.format(module=_MODULES[kind]), *arguments]


def encode_task(kind: str, texts: Sequence[str], max_cpu_s: float) -> bytes:
    """Encodes a grammar as a line. `kind`: as for `grammar_text`, or gbnf."""
    return json.dumps([kind, list(texts), max_cpu_s]).encode() + b"\n"


def encode_verdict(verdict: GrammarTrialResult) -> bytes:
    """Encodes the answer for a grammar as a line."""
    return json.dumps([verdict.error, verdict.lark, verdict.num_bytes]).encode() + b"\n"


def encode_end(exit_code: int) -> bytes:
    """Encodes the answer for a grammar whose process ended with `exit_code`."""
    return json.dumps([exit_code]).encode() + b"\n"


def decode_answer(line: bytes) -> GrammarTrialResult:
    """Decodes an answer. Raises TrialTooSlow, and TrialUnavailable, also for an incomplete line."""
    if not line.endswith(b"\n"):
        raise TrialUnavailable("the trial process ended")
    answer = parse_json(line)
    return _verdict_on_exit(*answer) if len(answer) == 1 else GrammarTrialResult(*answer)


def _verdict_on_exit(exit_code: int) -> GrammarTrialResult:
    """Returns the verdict for a process that ended early. `exit_code`: negative for a signal.

    Raises TrialTooSlow for SIGPROF, TrialUnavailable for exits that are not the grammar's fault.
    """
    if exit_code == -signal.SIGPROF:
        raise TrialTooSlow(TOO_SLOW)
    if exit_code in _OUT_OF_MEMORY:
        return GrammarTrialResult(TOO_LARGE)
    raise TrialUnavailable(f"the trial process exited with {exit_code}")


# -- Client of the trial process, which finds out whether grammars can be compiled -----------------


class GrammarTrials:
    """Trial process for grammars, started with the first one. Tries one grammar at a time.

    Thread-safe. Does not use the subprocesses of an event loop: uvloop forks for them, and the fork
    handlers of gRPC and Python crashed one child of twenty before it began. Here the child runs no
    code before exec, so `subprocess` uses `vfork`.
    """

    def __init__(
        self, command: Sequence[str] | None = None, max_wall_s: float = MAX_TRIAL_WALL_S
    ) -> None:
        """`command`: command line of the process; None for `trial_command`.

        `max_wall_s`: time in seconds after which a process is given up, even on a busy machine.
        """
        self._command = command or trial_command()
        self._max_wall_s = max_wall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()
        # Guards `_process` and `_is_closed`. Only held briefly.
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> GrammarTrialResult:
        """Tries a grammar and returns the verdict. Blocks.

        `max_cpu_s`: limit of CPU time. Raises TrialTooSlow, and TrialUnavailable if two processes
        in a row do not answer.
        """
        line = encode_task(kind, texts, max_cpu_s)
        with self._asking:
            for _ in range(NUM_TRIES - 1):
                with suppress(TrialUnavailable):
                    return self._ask(line)
            return self._ask(line)

    def close(self) -> None:
        """Kills the process and its children. Present and later calls raise TrialUnavailable."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                _kill(self._process)
        with self._asking:
            self._end()

    def _ask(self, line: bytes) -> GrammarTrialResult:
        is_answered = False
        try:
            process = self._running()
            # Covers writing, too: a long line is not written before the process reads.
            patience = threading.Timer(self._max_wall_s, self._give_up, (process,))
            patience.daemon = True
            patience.start()
            try:
                verdict_line = _exchange(process, line)
            finally:
                patience.cancel()
            is_answered = verdict_line.endswith(b"\n")
            return decode_answer(verdict_line)
        except OSError as error:
            raise TrialUnavailable(f"the trial process failed: {error}") from error
        finally:
            if not is_answered:
                # A late answer must not be taken for the answer to the next grammar.
                self._end()

    def _give_up(self, process: subprocess.Popen[bytes]) -> None:
        """Kills `process`, so that threads that write to or read from it continue."""
        with self._lock:
            if self._process is process:
                _kill(process)

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _kill(process)
        if process is not None:
            # Input that the process has not read is lost.
            with suppress(BrokenPipeError), process:
                process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise TrialUnavailable("the trial process is closed")
            if self._process is None:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            return self._process


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Sends `line` to `process` and returns its answer, incomplete if the process ends before."""
    assert process.stdin is not None, "started with pipes"
    assert process.stdout is not None, "started with pipes"
    # The process may have ended.
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline(MAX_LINE_BYTES)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, which share its pipes."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
