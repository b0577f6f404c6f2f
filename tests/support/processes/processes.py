"""Real scheduler, executor and gateway processes on free ports of this machine."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from splitserve_client import AsyncClient, ClientConfig, Executor, SplitserveError
from splitserve_options.option import BUNDLED_MODEL
from tests.support.processes import light_executor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ForkedProcess, start_process

START_TIMEOUT_S = 300.0
# A machine under load is late to answer pings, of which gRPC informs.
_INFO_OF_GRPC = re.compile(r"I\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\] ")


class Processes:
    """A scheduler, executors, perhaps a gateway; whatever still runs at the end is killed."""

    # The module that is run as an executor.
    executor_module = "executor_service"

    def __init__(self, model: Path, log: Path | None = None) -> None:
        """`log`: gets what all of them write to standard error."""
        self.model = model
        self.log = log
        self.address = reserve_address()
        self.scheduler: ForkedProcess | None = None
        self.executors: dict[str, ForkedProcess | subprocess.Popen[bytes]] = {}
        self.gateway: ForkedProcess | None = None

    def start_scheduler(self, *options: str) -> None:
        listen = ("--listen", self.address, "--cluster-listen", self.address)
        self.scheduler = self._start("scheduler_service", *listen, *options)

    def start_executor(self, *options: str, address: str = "") -> str:
        """Starts an executor and returns its address."""
        address = address or reserve_address()
        self.executors[address] = self._start(
            self.executor_module,
            *("--model", str(self.model), "--scheduler", self.address, "--listen", address),
            *("--num-device-blocks", "256", "--num-host-blocks", "0"),
            *options,
        )
        return address

    def start_gateway(self, *options: str) -> None:
        """Starts a gateway before the scheduler."""
        self.gateway = self._start("splitserve_gateway", "--schedulers", self.address, *options)

    def _start(self, package: str, *options: str) -> ForkedProcess:
        flags = ("--exit-on-stdin-eof", "--log-level", "error", *options)
        with nullcontext() if self.log is None else self.log.open("ab") as log:
            return start_process(
                package,
                flags,
                stdin=subprocess.PIPE,
                stderr=None if log is None else log.fileno(),
            )

    @property
    def is_scheduler_alive(self) -> bool:
        """Whether there is one, and it has not ended."""
        return self.scheduler is not None and self.scheduler.poll() is None

    def are_alive(self) -> bool:
        """Whether none has ended by itself."""
        return all(process.poll() is None for process in self._all())

    def _all(self) -> list[ForkedProcess | subprocess.Popen[bytes]]:
        processes: list[ForkedProcess | subprocess.Popen[bytes] | None] = [
            self.gateway,
            *self.executors.values(),
            self.scheduler,
        ]
        return [process for process in processes if process is not None]

    def kill_executor(self, address: str) -> None:
        _kill(self.executors.pop(address))

    async def stop_executor(self, address: str) -> int:
        """Tells it to stop as supervisors do, and waits for its end; returns the exit code."""
        process = self.executors[address]
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, START_TIMEOUT_S)
        _kill(self.executors.pop(address))
        return code

    def pause_executor(self, address: str) -> None:
        """Stops it in whatever it does, until `resume_executor`."""
        self.executors[address].send_signal(signal.SIGSTOP)

    def resume_executor(self, address: str) -> None:
        self.executors[address].send_signal(signal.SIGCONT)

    def kill_scheduler(self) -> None:
        assert self.scheduler is not None
        _kill(self.scheduler)

    def kill_all(self) -> None:
        for process in self._all():
            _kill(process)

    async def run_executors(self, count: int) -> list[Executor]:
        """Starts those of `count` that are missing, kills those too many; waits until all serve."""
        for address in list(self.executors)[count:]:
            self.kill_executor(address)
        while len(self.executors) < count:
            self.start_executor()
        return await self.wait_until(
            lambda executors: {e.address for e in executors} == self.executors.keys()
        )

    async def wait_known(self, num_requests: int) -> None:
        """Waits until executors have just so many requests, which run or wait there."""
        await self.wait_until(
            lambda executors: (
                sum(e.num_running_requests + e.num_waiting_requests for e in executors)
                == num_requests
            )
        )

    async def wait_until(
        self,
        holds: Callable[[list[Executor]], bool],
        address: str = "",
        config: ClientConfig | None = None,
    ) -> list[Executor]:
        """Polls the scheduler until `holds` of its connected executors.

        `address`: its address for operators, if that is another.
        """
        client = AsyncClient(address or self.address, config)
        async with asyncio.timeout(START_TIMEOUT_S), client:
            while True:
                with suppress(SplitserveError):
                    executors = [
                        e for e in (await client.list_executors()).executors if e.is_connected
                    ]
                    if holds(executors):
                        return executors
                await asyncio.sleep(0.02)


class LightProcesses(Processes):
    """With executors that start at once; `fake_truth` says what their clients must get."""

    executor_module = light_executor.MODULE

    def __init__(self, log: Path) -> None:
        super().__init__(Path(BUNDLED_MODEL), log)

    def log_text(self) -> str:
        """All errors, such as rows that read what is not theirs. Not what gRPC says of itself."""
        assert self.log is not None
        lines = self.log.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not _INFO_OF_GRPC.match(line))


@contextmanager
def light_processes(log: Path) -> Iterator[LightProcesses]:
    """Processes without a model that end with the context; then nobody may have had an error."""
    started = LightProcesses(log)
    try:
        yield started
    finally:
        started.kill_all()
    assert started.log_text() == ""


@contextmanager
def processes(model: Path, log: Path | None = None) -> Iterator[Processes]:
    """Processes that end with the context."""
    started = Processes(model, log)
    try:
        yield started
    finally:
        started.kill_all()


def _kill(process: ForkedProcess | subprocess.Popen[bytes]) -> None:
    """Harmless if it has ended."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
