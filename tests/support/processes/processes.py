"""Real scheduler, executor and gateway processes on free ports of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from splitserve_client import AsyncClient, ClientConfig, Executor, SplitserveError
from splitserve_options import BUNDLED_MODEL
from tests.contract.stranger.process import poll
from tests.support.processes import light_executor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ForkedProcess, children_take_sigint, start_process
from tests.support.processes.patience import PATIENCE_S

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
        """Waits until executors have exactly this number of running and waiting requests."""
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
    """Processes with executors without a model; see `expected_completions` for their tokens."""

    executor_module = light_executor.MODULE

    def __init__(self, log: Path) -> None:
        super().__init__(Path(BUNDLED_MODEL), log)

    def log_text(self) -> str:
        """All logged errors, such as rows that read others' blocks. Without gRPC's own messages."""
        assert self.log is not None
        lines = self.log.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not _INFO_OF_GRPC.match(line))


@contextmanager
def light_processes(log: Path) -> Iterator[LightProcesses]:
    """Processes without a model that end with the context; none may have logged an error."""
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


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """Running gateway process. `http`: client of it."""

    process: ForkedProcess
    http: httpx2.AsyncClient

    async def wait_ready(self, status: int = 200) -> None:
        """Waits until `/health/ready` says so."""
        await wait_ready(self.http, status)

    async def wait_models(self, names: set[str]) -> None:
        """Waits until just these are served."""

        async def ask() -> tuple[bool, object]:
            models = (await self.http.get("/v1/models")).json()["data"]
            return {model["id"] for model in models} == names, models

        await self.wait_ready()
        await poll(ask, PATIENCE_S)

    async def events(self, body: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed completion."""
        body = {**body, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def exit_code(self) -> int:
        """Waits for the end; returns the exit code."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


async def wait_ready(http: httpx2.AsyncClient, status: int = 200) -> None:
    """Waits until `/health/ready` of a gateway says so."""

    async def ask() -> tuple[bool, object]:
        try:
            answer = await http.get("/health/ready")
        except httpx2.HTTPError as error:
            return False, error
        return answer.status_code == status, answer.text

    await poll(ask, PATIENCE_S)


def start_gateway(schedulers: Sequence[str], http: str, *flags: str) -> ForkedProcess:
    """Starts one at `http`."""
    options = ("--schedulers", ",".join(schedulers), "--http", http, *flags)
    return start_process(
        "splitserve_gateway", options, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


@asynccontextmanager
async def gateway_process(
    *schedulers: str, flags: Sequence[str] = (), tls: ssl.SSLContext | None = None
) -> AsyncIterator[GatewayProcess]:
    """A gateway before `schedulers`. `tls`: how it is spoken to, None: in plain text."""
    address = reserve_address()
    process = start_gateway(schedulers, address, "--log-level", "error", *flags)
    base_url = f"http://{address}" if tls is None else f"https://{address}"
    try:
        async with httpx2.AsyncClient(
            base_url=base_url, timeout=PATIENCE_S, trust_env=False, verify=tls or True
        ) as http:
            yield GatewayProcess(process, http)
    finally:
        process.kill()
        process.communicate()


# Some twenty requests of this size need twice as many blocks as two executors have.
_POOLS = ("--num-device-blocks", "80", "--num-host-blocks", "160")
_LOAD = (
    *("--concurrency", "24", "--requests", "1000000", "--output-tokens", "uniform:60:200"),
    *("--prompt-tokens", "lognormal:60:0.5", "--shared-prefix", "48:3"),
    *("--max-prompt-tokens", "300", "--max-output-tokens", "200", "--seed", "1", "--quiet"),
)


@dataclass(frozen=True, slots=True)
class LoadedStack:
    """A scheduler, two executors of the bundled model, a gateway, and `splitserve bench`.

    `url`: of the live page.
    """

    processes: Processes
    url: str
    load: asyncio.subprocess.Process

    async def end_load(self) -> str:
        """Interrupts the load as Ctrl-C does; returns its report."""
        self.load.send_signal(signal.SIGINT)
        said, _ = await asyncio.wait_for(self.load.communicate(), PATIENCE_S)
        return said.decode()


@asynccontextmanager
async def loaded_stack() -> AsyncIterator[LoadedStack]:
    """Runs the stack until the end of the context."""
    page, http = reserve_address(), reserve_address()
    with processes(Path(BUNDLED_MODEL)) as served:
        served.start_scheduler("--preemption-mode", "swap")
        for _ in range(2):
            served.start_executor(*_POOLS)
        served.start_gateway("--http", http, "--live-listen", page)
        await served.wait_until(lambda executors: len(executors) == 2)
        async with httpx2.AsyncClient(base_url=f"http://{http}", trust_env=False) as client:
            await wait_ready(client)
        with children_take_sigint():
            load = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "splitserve_bench", f"http://{http}/v1", *_LOAD),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        try:
            yield LoadedStack(served, f"http://{page}/", load)
        finally:
            if load.returncode is None:
                load.kill()
                await load.wait()
