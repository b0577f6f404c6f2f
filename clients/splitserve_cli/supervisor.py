"""Supervisor of `splitserve serve`, its child processes, and its progress line."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TextIO

from splitserve_cli.serve_config import ServeConfig

_EXECUTOR_GRACE_S = 5.0
# In addition to the time for unfinished requests.
_SCHEDULER_GRACE_S = 3.0
_GATEWAY_GRACE_S = 3.0
_FIRST_RESTART_S = 0.5
_MAX_RESTART_S = 30.0
# A process that ran for this long did not fail because of its options.
_STABLE_AFTER_S = 60.0


class Supervisor:
    """Starts, watches, restarts and stops the child processes; `run` covers the whole time."""

    def __init__(
        self,
        config: ServeConfig,
        scheduler: Child,
        executors: Sequence[Child],
        gateway: Child | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._executors = tuple(executors)
        self._gateways = () if gateway is None else (gateway,)
        self._children = (scheduler, *executors, *self._gateways)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serves until Ctrl-C or SIGTERM; a second signal kills. Returns the exit code.

        Returns 0 after a stop, 1 if a process ended before the server could take requests.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            for child in self._children:
                await child.start()
            failure = await self._wait_until_serving()
            if failure:
                sys.stderr.write(f"splitserve serve: {failure}\n")
                return 1
            await self._serve()
            return 0
        finally:
            async with showing_progress("stopping"):
                await self._stop_children()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for child in self._children:
                child.kill()
        self._stop.set()

    async def _wait_until_serving(self) -> str:
        """Waits until the server takes requests.

        Returns why it never will, or "" if it does or is stopped.
        """
        from splitserve_cli.welcome import wait_until_serving  # slow import of gRPC

        stop = asyncio.create_task(self._stop.wait())
        serving = asyncio.create_task(wait_until_serving(self._config))
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        async with showing_progress(f"loading model {self._config.model}"):
            done, pending = await asyncio.wait(
                {stop, serving, *ends}, return_when=asyncio.FIRST_COMPLETED
            )
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if stop in done or serving in done:
            return ""
        ended = next(task for task in ends if task in done)
        how = describe_exit(ended.result())
        return f"{ends[ended].name} ended before the model was served ({how}); see above"

    async def _serve(self) -> None:
        if self._stop.is_set():
            return
        from splitserve_cli.welcome import welcome

        tasks = [asyncio.create_task(self._keep_alive(child)) for child in self._children]
        tasks.append(asyncio.create_task(welcome(self._config)))
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, child: Child) -> None:
        """Restarts `child` whenever it ends, with a backoff that grows while it keeps failing."""
        delay_s = _FIRST_RESTART_S
        while True:
            started_at = time.monotonic()
            how = describe_exit(await child.wait())
            if time.monotonic() - started_at > _STABLE_AFTER_S:
                delay_s = _FIRST_RESTART_S
            sys.stderr.write(
                f"splitserve serve: {child.name} ended ({how}); starting it again in"
                f" {delay_s:g} s\n"
            )
            sys.stderr.flush()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RESTART_S)
            await child.start()

    async def _stop_children(self) -> None:
        """Stops the gateway, then the scheduler, then the executors.

        Each needs the next one to finish its requests.
        """
        grace_s = self._config.drain_timeout_s + _GATEWAY_GRACE_S
        await asyncio.gather(*(child.stop(grace_s) for child in self._gateways))
        await self._scheduler.stop(self._config.drain_timeout_s + _SCHEDULER_GRACE_S)
        await asyncio.gather(*(child.stop(_EXECUTOR_GRACE_S) for child in self._executors))


# -- child process ---------------------------------------------------------------------------------


class Child:
    """Child process that holds the read end of a pipe, and stops when the pipe closes.

    So the child ends with this process, however this process ends. The child runs in a session of
    its own: Ctrl-C in the terminal reaches only the supervisor, which decides the order of
    stopping.

    `cluster_token`: passed through a pipe at each start, as files and environments outlive its use
    and `ps` shows command lines to everybody. `errors`: destination of the child's output; None for
    the standard error of this process. `listening`: a socket that the child inherits with the same
    number at each start.
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
        # -P: files in the working directory must not shadow a module.
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
        """Waits for the end of the process; returns its exit code, negative after a signal."""
        return await self._process.wait() if self._process is not None else 0

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM to the process, and kills it after `grace_s`."""
        if self._process is None or self._process.returncode is not None:
            return
        self._send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Kills the process immediately."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _pipe_with(text: str) -> int:
    """Returns the read end of a pipe that holds `text` and nothing else."""
    reading, writing = os.pipe()
    with open(writing, "w", encoding="ascii") as pipe:
        pipe.write(text)  # far less than the capacity of a pipe
    return reading


def describe_exit(code: int) -> str:
    """Returns an exit code as text."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# -- progress of slow operations -------------------------------------------------------------------

_FIRST_S = 1
_LINE_EVERY_S = 10


@asynccontextmanager
async def showing_progress(what: str) -> AsyncIterator[None]:
    """Shows `what` and the elapsed seconds on standard error, from the first second on.

    On a terminal one line is rewritten; a log gets a line every ten seconds.
    """
    task = asyncio.create_task(_show(what))
    try:
        yield
    finally:
        task.cancel()
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


async def _show(what: str) -> None:
    is_terminal = sys.stderr.isatty()
    start = time.monotonic()
    while True:
        await asyncio.sleep(1)
        seconds = round(time.monotonic() - start)
        if is_terminal:
            # The cursor stays at the start, so that a log line of a child replaces this line.
            sys.stderr.write(f"\r\x1b[K{what} ... {seconds} s\r")
        elif seconds == _FIRST_S or seconds % _LINE_EVERY_S == 0:
            sys.stderr.write(f"{what} ... {seconds} s\n")
        sys.stderr.flush()
