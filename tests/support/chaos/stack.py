"""A real stack whose parts can die: a scheduler, executors over a bad network, a gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from splitserve_client import AsyncClient, ExecutorList, SplitserveError
from splitserve_rpc.grpc_threads import with_fewer_threads
from tests.contract.stranger.process import poll
from tests.support.chaos.network import Network
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT, ForkedProcess, start_process
from tests.support.processes.patience import PATIENCE_S, PATIENT

BUNDLED = ROOT / "executor_service" / "bundled_model"
# Few, so that requests preempt each other while an executor is away.
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 192, 64
_EXECUTOR_OPTIONS = (
    *("--model", str(BUNDLED), "--dtype", "float32", "--deterministic", "--log-level", "info"),
    *("--num-host-blocks", str(NUM_HOST_BLOCKS)),
)

_EXECUTOR = "tests.support.chaos.rigged_executor"

Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass
class Stack:
    """What runs. Whatever is started or ended twice stays as it is.

    `sessions`: of all processes that ever began, whose descendants are in them.
    """

    network: Network
    folder: Path
    num_executors: int
    scheduler_options: Sequence[str]
    client: AsyncClient
    operator: AsyncClient
    http: httpx2.AsyncClient
    address: str
    http_address: str
    num_device_blocks: int = NUM_DEVICE_BLOCKS
    processes: dict[str, Process] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)
    # When the life of each executor began; its epoch is later.
    began_ns: dict[str, int] = field(default_factory=dict)
    # Of whoever ended while this was not looking, by any other way than SIGKILL.
    crashes: list[str] = field(default_factory=list)
    # Whoever is being killed or started: nobody begins in its place before that is over.
    _changing: set[str] = field(default_factory=set)

    # -- who lives ---------------------------------------------------------------------------------

    @property
    def executor_names(self) -> list[str]:
        """Of all that there are to be."""
        return [f"executor-{index}" for index in range(self.num_executors)]

    def start_scheduler(self) -> None:
        listen = ("--listen", self.address, "--cluster-listen", self.network.cluster_listen)
        journal = ("--journal", str(self.folder / "journal"), "--journal-max-mib", "4")
        guesses = ("--speculation", "prompt-lookup")
        options = (*self.network.scheduler_options, *guesses, *self.scheduler_options)
        self._start("scheduler", "scheduler_service", *listen, *journal, *options)

    def start_gateway(self) -> None:
        listen = ("--schedulers", self.address, "--http", self.http_address)
        self._start("gateway", "splitserve_gateway", *listen, "--log-level", "info")

    async def start_executor(self, index: int) -> None:
        name, place = self.executor_names[index], self.network.place(index)
        if not self._is_missing(name):
            return
        where = ["--listen", place.listen, "--advertise-address", place.advertise]
        where += ["--scheduler", place.scheduler, *place.options]
        options = [*where, "--num-device-blocks", str(self.num_device_blocks), *_EXECUTOR_OPTIONS]
        self.began_ns[place.advertise] = time.time_ns()
        with self._change(name):
            process = await asyncio.to_thread(self._fork, name, place.namespace, options)
            self._note(name, process)
            await self.network.executor_began(index)

    def _fork(self, name: str, namespace: int | None, options: Sequence[str]) -> ForkedProcess:
        with self.log(name).open("ab") as log, open(os.devnull, "rb") as nothing:
            arguments = [str(namespace or 0), str(self.sickness(name)), *options]
            return start_process(_EXECUTOR, arguments, stdin=nothing.fileno(), stderr=log.fileno())

    def _start(self, name: str, package: str, *options: str) -> None:
        if not self._is_missing(name):
            return
        told = {k: v for k, v in os.environ.items() if not k.startswith("SPLITSERVE_")}
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", package, *options],
                stdin=subprocess.DEVNULL,
                stderr=log,
                cwd=ROOT,
                env=with_fewer_threads(told),
                start_new_session=True,
            )
        self._note(name, process)

    def _note(self, name: str, process: Process) -> None:
        before = self.processes.get(name)
        if before is not None and before.poll() != -signal.SIGKILL:
            self.crashes.append(f"{name} ended with {before.poll()}")
        self.processes[name] = process
        self.sessions.add(process.pid)

    def log(self, name: str) -> Path:
        """What it writes to standard error, in all its lives."""
        return self.folder / f"{name}.log"

    def sickness(self, name: str) -> Path:
        """A file that says what is wrong with an executor, while it is there (`Sickness`)."""
        return self.folder / f"{name}.sickness"

    def is_alive(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def _is_missing(self, name: str) -> bool:
        return not self.is_alive(name) and name not in self._changing

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    def pid(self, name: str) -> int:
        """Of its present or last life."""
        return self.processes[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Harmless if it has ended."""
        if self.is_alive(name):
            with suppress(ProcessLookupError):
                os.kill(self.pid(name), number)

    async def kill(self, name: str) -> None:
        """Ends a life by SIGKILL."""
        with self._change(name):
            self.signal(name, signal.SIGKILL)
            await self.wait_ended(name)
            if name in self.executor_names:
                self.network.executor_ended(self.executor_names.index(name))

    async def wait_ended(self, name: str) -> int:
        """Its exit code, negative for a signal."""
        process = self.processes[name]

        async def look() -> tuple[bool, int | None]:
            code = process.poll()
            return code is not None, code

        code = await poll(look, PATIENCE_S)
        assert code is not None
        return code

    async def start_missing(self) -> None:
        """Starts whoever does not live."""
        self.start_scheduler()
        self.start_gateway()
        for index in range(self.num_executors):
            await self.start_executor(index)

    # -- how they are ------------------------------------------------------------------------------

    async def wait_for(self, holds: Callable[[ExecutorList], bool]) -> ExecutorList:
        """Asks the scheduler until `holds` of its executors. Raises TimeoutError."""

        async def ask() -> tuple[bool, object]:
            try:
                listed = await self.operator.list_executors()
            except SplitserveError as error:
                return False, error
            return holds(listed), listed

        listed = await poll(ask, PATIENCE_S)
        assert isinstance(listed, ExecutorList)
        return listed

    async def wait_ready(self) -> None:
        """Waits until everybody serves, in the present life."""
        await self.wait_for(self._are_all_connected)

        async def ask() -> tuple[bool, object]:
            try:
                answer = await self.http.get("/health/ready")
            except httpx2.HTTPError as error:
                return False, error
            return answer.status_code == 200, answer.text

        await poll(ask, PATIENCE_S)

    def _are_all_connected(self, listed: ExecutorList) -> bool:
        epochs = {e.address: e.executor_epoch for e in listed.executors if e.is_connected}
        return all(epochs.get(at, 0) >= began_ns for at, began_ns in self.began_ns.items())

    def are_all_well(self, listed: ExecutorList) -> bool:
        """Whether all are connected, and none fails."""
        is_any_failing = any(executor.is_failing for executor in listed.executors)
        return self._are_all_connected(listed) and not is_any_failing

    async def wait_idle(self) -> None:
        """Waits until no request is anywhere and every block of every executor is free."""
        await self.wait_for(
            lambda listed: (
                listed.num_unassigned_requests == 0
                and self._are_all_connected(listed)
                and all(
                    e.num_running_requests == e.num_waiting_requests == e.num_swapped_requests == 0
                    and e.num_free_device_blocks == e.num_device_blocks
                    and e.num_free_host_blocks == e.num_host_blocks
                    for e in listed.executors
                    if e.is_connected
                )
            )
        )

    async def stop(self) -> dict[str, int]:
        """Asks all to end, as an operator does; what each ends with."""
        for name in ("gateway", *self.executor_names, "scheduler"):
            self.signal(name, signal.SIGTERM)
        return {name: await self.wait_ended(name) for name in self.processes}


@asynccontextmanager
async def running_stack(
    network: Network,
    folder: Path,
    *scheduler_options: str,
    num_executors: int = 3,
    num_device_blocks: int = NUM_DEVICE_BLOCKS,
) -> AsyncIterator[Stack]:
    """All of it, ready; whoever still lives afterwards is killed."""
    address, http_address = reserve_address(), reserve_address()
    async with (
        AsyncClient(address, PATIENT) as client,
        AsyncClient(network.cluster_listen, PATIENT) as operator,
        httpx2.AsyncClient(
            base_url=f"http://{http_address}", timeout=PATIENCE_S, trust_env=False
        ) as http,
    ):
        clients = client, operator, http
        stack = Stack(
            network,
            folder,
            num_executors,
            scheduler_options,
            *clients,
            address,
            http_address,
            num_device_blocks,
        )
        try:
            await stack.start_missing()
            await stack.wait_ready()
            yield stack
        finally:
            for name in stack.processes:
                stack.signal(name, signal.SIGKILL)
                await stack.wait_ended(name)
