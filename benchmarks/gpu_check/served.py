"""A scheduler and an executor as processes of their own, and what they left in their logs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.machine import ROOT
from benchmarks.gpu_check.watched_executor import BREAK_RECORDINGS, COMPILED
from splitserve_client import AsyncClient, Executor, SplitserveError

_STOP_S = 20
_NUM_LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Served:
    """What runs at `address`. `start_s`: until the executor was connected.

    `num_compiled_at_start`: kernels, until then.
    """

    address: str
    start_s: float
    folder: Path
    num_compiled_at_start: int

    def executor(self) -> Executor:
        """As the scheduler sees it now."""
        return asyncio.run(_executors(self.address))[0]

    @property
    def compiled_later(self) -> list[str]:
        """Kernels that the executor compiled since then."""
        return _compiled(self.folder)[self.num_compiled_at_start :]

    @property
    def log(self) -> str:
        """Of the executor."""
        return _text(self.folder / "executor.log")


@contextmanager
def serving(
    model: str,
    folder: Path,
    timeout_s: float,
    executor_flags: tuple[str, ...] = (),
    scheduler_flags: tuple[str, ...] = (),
    *,
    breaks_recordings: bool = False,
) -> Iterator[Served]:
    """Both, until the end; `folder` is made for their logs. Raises RuntimeError if one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {COMPILED: str(folder / "compiled")}
    if breaks_recordings:
        environment[BREAK_RECORDINGS] = "1"
    commands = {
        "scheduler": [
            *("scheduler_service", "--listen", address, "--cluster-listen", address),
            *scheduler_flags,
        ],
        "executor": [
            *("benchmarks.gpu_check.watched_executor", "--model", model),
            *("--scheduler", address, "--listen", "127.0.0.1:0", *executor_flags),
        ],
    }
    started = time.perf_counter()
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(_process(command, folder / f"{name}.log", environment))
            for name, command in commands.items()
        }
        asyncio.run(_wait(address, processes, folder, timeout_s))
        yield Served(address, time.perf_counter() - started, folder, len(_compiled(folder)))


@contextmanager
def _process(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--exit-on-stdin-eof"],
            # If this process dies, they end.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


async def _wait(
    address: str, processes: Mapping[str, subprocess.Popen[bytes]], folder: Path, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    while True:
        for name, process in processes.items():
            if process.poll() is not None or time.monotonic() > end:
                ended = f"ended with {process.returncode}" if process.poll() else "was not ready"
                lines = _text(folder / f"{name}.log").splitlines()[-_NUM_LOG_LINES:]
                sys.stderr.write("\n".join([f"--- log of the {name}", *lines, ""]))
                raise RuntimeError(f"the {name} {ended}: {' / '.join(lines[-2:])}")
        with suppress(SplitserveError):
            if any(executor.is_connected for executor in await _executors(address)):
                return
        await asyncio.sleep(0.2)


async def _executors(address: str) -> list[Executor]:
    async with AsyncClient(address) as client:
        return list((await client.list_executors()).executors)


def _compiled(folder: Path) -> list[str]:
    return _text(folder / "compiled").splitlines()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
