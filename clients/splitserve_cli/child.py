"""One process that the supervisor of `splitserve serve` owns."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress


class Child:
    """A service process. It holds the read end of a pipe of ours and stops when that closes.

    So it ends with this process however this process ends. It runs in a session of its own: a
    Ctrl-C in the terminal reaches only us, and we decide in which order to stop.
    """

    def __init__(
        self, name: str, module: str, options: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.name = name
        # -P: what lies in the working directory is not to shadow a module.
        self._command = (
            sys.executable, "-P", "-m", module, *options, "--exit-on-stdin-eof",
        )  # fmt: skip
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process; its output goes to our standard error."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            env=self._environ,
            start_new_session=True,
        )

    async def wait(self) -> int:
        """Waits for its end; returns the exit code, negative after a signal."""
        return await self._process.wait() if self._process is not None else 0

    async def stop(self, grace_s: float) -> None:
        """Asks it to end, and kills it after `grace_s`."""
        if self._process is None or self._process.returncode is not None:
            return
        self._send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Ends it at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def describe_exit(code: int) -> str:
    """An exit code as people say it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
