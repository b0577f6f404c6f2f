"""Whether a grammar can be compiled at all, found out where it can do no harm.

A text of a few bytes may compile for hours, or end the process that tries (its rules are followed
by recursion). So each is tried in a process of its own, which can be ended.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from executor_service.grammars.limits import (
    MAX_COMPILE_BYTES,
    MAX_COMPILE_CPU_S,
    PARSER_LIMITS,
    STACK_BYTES,
)

_SCRIPT = Path(__file__).with_name("trial_process.py")
# A process that waits for a processor so long is given up, too.
_MAX_WAIT_S = 20 * MAX_COMPILE_CPU_S
_TOO_SLOW = f"it takes more than {MAX_COMPILE_CPU_S} s to compile"
_TOO_LARGE = "it takes too much memory to compile"


class CompileTrial:
    """A process that tries grammars one by one; it starts with the first. Not thread-safe."""

    def __init__(self, max_cpu_s: int = MAX_COMPILE_CPU_S) -> None:
        self._max_cpu_s = max_cpu_s
        self._process: subprocess.Popen[str] | None = None

    def find_error(self, grammar: str) -> str:
        """What is wrong with `grammar`, a text for llguidance; empty if it compiles. Waits."""
        process = self._running()
        task = {
            "grammar": grammar,
            "max_cpu_s": self._max_cpu_s,
            "parser_limits": PARSER_LIMITS,
        }
        assert process.stdin is not None, "it has pipes"
        assert process.stdout is not None, "it has pipes"
        answer = ""
        # It may be gone already.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], _MAX_WAIT_S)[0]:
                answer = process.stdout.readline()
        if answer:
            error: str = json.loads(answer)
            return error
        return _TOO_SLOW if self.close() in (-signal.SIGXCPU, -signal.SIGKILL) else _TOO_LARGE

    def close(self) -> int:
        """Ends the process; returns how it ended, a signal as a negative number."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.kill()
        with process:
            return process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            arguments = [str(_SCRIPT), str(MAX_COMPILE_BYTES), str(STACK_BYTES)]
            self._process = subprocess.Popen(
                # What lies in the working directory is not imported.
                [sys.executable, "-P", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process
