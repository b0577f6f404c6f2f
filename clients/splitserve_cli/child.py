"""One process that the supervisor of `splitserve serve` owns."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO


class Child:
    """A service process. It holds the read end of a pipe of ours and stops when that closes.

    So it ends with this process however this process ends. It runs in a session of its own: a
    Ctrl-C in the terminal reaches only us, and we decide in which order to stop.

    `cluster_token` reaches it through a pipe, each time that it starts: what is on a disk or in an
    environment outlives its use, and command lines are read by everybody (`ps`). `errors`: where
    its output goes; None: to our standard error. `listening`: a socket that it gets under our
    number, each time that it starts.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: Sequence[str],
        environ: Mapping[str, str],
        cluster_token: str | None = None,
        errors: TextIO | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        self.name = name
        self._cluster_token = cluster_token
        # -P: what lies in the working directory is not to shadow a module.
        self._command = (
            sys.executable, "-P", "-m", module, *options, "--exit-on-stdin-eof",
        )  # fmt: skip
        self._environ = dict(environ)
        self._errors = errors or sys.stderr
        self._listening = listening
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process."""
        if self._cluster_token is None:
            await self._start(())
            return
        pipe = _pipe_with(self._cluster_token)
        try:
            await self._start((f"--cluster-token-file=/dev/fd/{pipe}",), pipe)
        finally:
            os.close(pipe)

    async def _start(self, more_options: Sequence[str], *inherited: int) -> None:
        sockets = () if self._listening is None else (self._listening.fileno(),)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *more_options,
            stdin=asyncio.subprocess.PIPE,
            stdout=self._errors.fileno(),
            stderr=self._errors.fileno(),
            env=self._environ,
            pass_fds=(*inherited, *sockets),
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


def _pipe_with(text: str) -> int:
    """The end to read of a pipe that holds `text` and nothing more."""
    reading, writing = os.pipe()
    with open(writing, "w", encoding="ascii") as pipe:
        pipe.write(text)  # far less than a pipe holds
    return reading


def describe_exit(code: int) -> str:
    """An exit code as people say it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
