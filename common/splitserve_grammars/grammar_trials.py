"""Client of the trial process, which finds out whether grammars can be compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from splitserve_grammars.limits import MAX_TRIAL_WALL_S, NUM_TRIES
from splitserve_grammars.trial import (
    MAX_LINE_BYTES,
    TrialUnavailable,
    Verdict,
    decode_answer,
    encode_task,
    trial_command,
)


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

    def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> Verdict:
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

    def _ask(self, line: bytes) -> Verdict:
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
            raise TrialUnavailable(f"no process can try grammars: {error}") from error
        finally:
            if not is_answered:
                # A late answer must not be taken for the answer to the next question.
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
                raise TrialUnavailable("grammars are no longer tried")
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
    assert process.stdin is not None, "it has pipes"
    assert process.stdout is not None, "it has pipes"
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
