"""Whether grammars can be compiled at all: asked of a process beside this one."""

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
    """A process that tries grammars one by one; it starts with the first.

    For any thread; one asks at a time. Not with the subprocesses of an event loop: uvloop forks for
    them, and what gRPC and Python do in a fork crashed one of twenty before it had begun. Here
    nothing is done in the child, so `subprocess` does without a fork (`vfork`).
    """

    def __init__(
        self, command: Sequence[str] | None = None, max_wall_s: float = MAX_TRIAL_WALL_S
    ) -> None:
        """`command`: what starts the process; None for `trial_command`.

        `max_wall_s`: after so long a process is given up, also where the machine is busy.
        """
        self._command = command or trial_command()
        self._max_wall_s = max_wall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()
        # Of `_process` and `_is_closed`; nobody holds it for long.
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> Verdict:
        """Waits. Raises TrialTooSlow; TrialUnavailable if two processes in a row say nothing."""
        line = encode_task(kind, texts, max_cpu_s)
        with self._asking:
            for _ in range(NUM_TRIES - 1):
                with suppress(TrialUnavailable):
                    return self._ask(line)
            return self._ask(line)

    def close(self) -> None:
        """Ends the process, and what it began; who asks, now or later, gets TrialUnavailable."""
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
            # Whatever the process does not do: a long line is not written before it reads.
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
                # Whatever it may still say is no answer to what is asked next.
                self._end()

    def _give_up(self, process: subprocess.Popen[bytes]) -> None:
        """Ends `process`, so that whoever writes to it or reads from it goes on."""
        with self._lock:
            if self._process is process:
                _kill(process)

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _kill(process)
        if process is not None:
            # What it has not read is lost with it.
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
    """What `process` says of `line`; no whole line if it ends before."""
    assert process.stdin is not None, "it has pipes"
    assert process.stdout is not None, "it has pipes"
    # It may be gone already.
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline(MAX_LINE_BYTES)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends it with what it began, which has its pipes, too."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
