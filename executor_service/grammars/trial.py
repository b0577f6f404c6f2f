"""Whether a grammar can be compiled at all: asked of a process beside this one."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from executor_service.steps.sampling_params import Grammar
from splitserve_grammars.limits import MAX_TRIAL_WALL_S, NUM_TRIES
from splitserve_grammars.trial import (
    TrialUnavailable,
    Verdict,
    decode_answer,
    encode_task,
    trial_command,
)


class CompileTrial:
    """A process that tries grammars one by one; it starts with the first. Not thread-safe."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        """`command`: what starts the process; None for `trial_command`."""
        self._command = command or trial_command()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, grammar: Grammar, max_cpu_s: float) -> Verdict:
        """Waits. Raises TrialTooSlow; TrialUnavailable if two processes in a row say nothing."""
        line = encode_task(grammar.kind, grammar.texts, max_cpu_s)
        for _ in range(NUM_TRIES - 1):
            with suppress(TrialUnavailable, OSError):
                return self._ask(line)
        return self._ask(line)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # What it has not read is lost with it.
            with suppress(BrokenPipeError), process:
                process.wait()

    def _ask(self, line: bytes) -> Verdict:
        stdin, stdout = self._pipes()
        # It may be gone already.
        with suppress(BrokenPipeError):
            stdin.write(line)
            stdin.flush()
        is_answered = select.select([stdout], [], [], MAX_TRIAL_WALL_S)[0]
        try:
            return decode_answer(stdout.readline() if is_answered else b"")
        except TrialUnavailable:
            self.close()
            raise

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it has pipes"
        assert stdout is not None, "it has pipes"
        return stdin, stdout
