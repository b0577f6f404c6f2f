"""Processes that begin at once: forked off one that has imported what they need.

What a process imports is by far the most that its start costs: a scheduler a second of a core, an
executor eight. Each process of tests has one to fork off executors, and one for all others. That
the programs start without that is shown where they are tested by themselves: `test_*_cli`,
`test_*_process`, `test_composed_processes`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO

from splitserve_common import with_fewer_threads
from tests.support.processes import fork_server
from tests.support.processes.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
SOURCE_ROOTS = (".", "common", "protos", "kernels", "clients")
_NEED_TORCH = (
    "executor_service",
    "tests.support.chaos.rigged_executor",
    "tests.support.processes.gate",
)


class ForkedProcess:
    """Forked process with the methods of subprocess.Popen."""

    def __init__(
        self, pid: int, ended: int, stdin: IO[bytes] | None, stderr: IO[bytes] | None
    ) -> None:
        """`ended`: the pipe that gets its exit code."""
        self.pid = pid
        self.stdin = stdin
        self.stderr = stderr
        self.returncode: int | None = None
        self._ended = ended
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, ended)

    def poll(self) -> int | None:
        """The exit code, None if it runs."""
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                # Nothing is there if whoever would have told it was killed itself.
                self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._ended], [], [], timeout)[0])

    def send_signal(self, number: int) -> None:
        """Harmless if it has ended, which may be known here only a moment later."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[None, bytes | None]:
        """Waits for the end; returns standard error if that is a pipe."""
        errors = None
        if self.stdin is not None:
            self.stdin.close()
        if self.stderr is not None:
            with self.stderr:
                errors = self.stderr.read()
        self.wait()
        return None, errors


class _Forker:
    """A process to fork from, which has imported `modules`; it begins with its first child."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._asking: socket.socket | None = None

    def fork(self, request: Mapping[str, object], descriptors: Sequence[int]) -> int:
        """The pid of a child with these standard streams and this pipe for its exit code."""
        body = json.dumps(request).encode()
        with self._lock:
            if self._asking is None:
                self._asking = self._start()
            length = len(body).to_bytes(fork_server.LENGTH_BYTES)
            socket.send_fds(self._asking, [length], descriptors)
            self._asking.sendall(body)
            pid = int.from_bytes(self._asking.recv(fork_server.LENGTH_BYTES, socket.MSG_WAITALL))
        if not pid:
            raise RuntimeError(f"nobody forks: importing {', '.join(self._modules)} failed")
        return pid

    def _start(self) -> socket.socket:
        asking, answering = socket.socketpair()
        with answering:
            process = subprocess.Popen(
                [sys.executable, "-m", fork_server.__name__, *self._modules],
                cwd=ROOT,
                env=_environment(),
                stdin=answering.fileno(),
            )
        atexit.register(process.wait)
        atexit.register(asking.close)
        return asking


_light = _Forker(
    "scheduler_service.__main__",
    "splitserve_gateway.__main__",
    *("splitserve_cli.info", "splitserve_cli.drain", "splitserve_cli.generate"),
)
_with_torch = _Forker(
    *("executor_service.__main__", "executor_service.engine_loader"),
    "transformers.generation.utils",  # imported with the first model
)
# Nothing of ours: what runs there changes it before it is imported.
_of_tests = _Forker(
    *("pytest", "anyio.pytest_plugin", "hypothesis.stateful"),
    *("numpy", "torch", "grpc.aio", "google.protobuf.message"),
)
_RUN_TESTS = "tests.mutants.run_mutant"


def start_process(
    package: str,
    options: Sequence[str],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> ForkedProcess:
    """Starts `python -m package` with `options` in a new process.

    Of this environment it has all but SPLITSERVE_*, and `environment`. Of the streams each is a
    descriptor, PIPE (not `stdout`), or None: that of the tests.
    """
    forker = _with_torch if package in _NEED_TORCH else _light
    if package == _RUN_TESTS:
        forker = _of_tests
    module = package if package.startswith("tests.") else f"{package}.__main__"
    request = {
        "module": module,
        "arguments": list(options),
        "environment": {**_environment(), **environment},
    }
    with ExitStack() as theirs:
        writing = reading = None
        if stdin == subprocess.PIPE:
            stdin, end = os.pipe()
            theirs.callback(os.close, stdin)
            writing = os.fdopen(end, "wb", buffering=0)
        if stderr == subprocess.PIPE:
            end, stderr = os.pipe()
            theirs.callback(os.close, stderr)
            reading = os.fdopen(end, "rb")
        ended, telling = os.pipe()
        theirs.callback(os.close, telling)
        streams = [
            own if told is None else told for own, told in enumerate((stdin, stdout, stderr))
        ]
        pid = forker.fork(request, [*streams, telling])
    return ForkedProcess(pid, ended, writing, reading)


def run_process(
    package: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `start_process` to the end, without input."""
    return run_patiently(PATIENCE_S, package, *options, **environment)


def run_patiently(
    patience_s: float, package: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Same as `run_process`. Raises subprocess.TimeoutExpired after `patience_s`."""
    with TemporaryFile() as out, TemporaryFile() as errors, open(os.devnull, "rb") as nothing:
        process = start_process(
            package,
            options,
            environment=environment,
            stdin=nothing.fileno(),
            stdout=out.fileno(),
            stderr=errors.fileno(),
        )
        try:
            code = process.wait(patience_s)
        finally:
            process.kill()
        said = []
        for stream in (out, errors):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess([package, *options], code, *said)


def _environment() -> dict[str, str]:
    told = {k: v for k, v in os.environ.items() if not k.startswith("SPLITSERVE_")}
    paths = os.pathsep.join(str(ROOT / part) for part in SOURCE_ROOTS)
    return with_fewer_threads(told) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


@contextmanager
def children_take_sigint() -> Iterator[None]:
    """Children started meanwhile have the default disposition of SIGINT.

    Children inherit that a signal is ignored, and a script's shell ignores SIGINT for all that it
    runs in the background: a whole test run may have been started like that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
